"""A valid key that the run does not read gets one notice, never an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.forked import run_program
from tests.integration.runs import overrides
from trainer import load_config, main_ppo
from trainer.config.schema import Recipe
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT

NEEDED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
NO_CRITIC, BY_TOKENS, ROWS = (
    "algorithm.adv_estimator=reinforce_plus_plus",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.use_dynamic_bsz=false",
)
ONLY_REWARD_MODEL = [
    *("reward.model.enable=true", "reward.model.path=judge", "reward.function.weight=0"),
    "role_mapping.reward_model=global_pool",
]


GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2"]


def notices(caplog: pytest.LogCaptureFixture, *settings: str, recipe: Any = None) -> list[str]:
    """Return the notices about keys without effect for these settings."""
    caplog.clear()
    load_config(settings, recipe) if recipe else load_config([*NEEDED, *settings])
    return [text for text in caplog.messages if "no effect" in text]


@pytest.mark.parametrize(
    ("key", "settings"),
    [
        ("actor_rollout_ref.model.lora_alpha=8", []),
        (
            "actor_rollout_ref.actor.clip_ratio_c=4",
            ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo"],
        ),
        (
            "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
            ["trainer.save_every_minutes=null"],
        ),
        (
            "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
            ["algorithm.use_kl_in_reward=true", BY_TOKENS],
        ),
        ("critic.ppo_max_token_len_per_gpu=64", [ROWS]),
        ("reward.score_on_failure=1", ONLY_REWARD_MODEL),
        ("cpus_per_process=0.5", ["trainer.backend=local"]),
        ("ray.runtime_env.env_vars.A=1", ["trainer.backend=local"]),
    ],
)
def test_an_unread_key_has_one_notice(
    key: str, settings: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (notice,) = notices(caplog, *settings, key)
    assert notice.startswith(f"note: {key.split('=')[0]} has no effect: ")


@pytest.mark.parametrize(
    ("settings", "notice"),
    [
        (
            ["data.val_files=v.parquet", "trainer.test_freq=-1", "trainer.val_before_train=false"],
            "data.val_files has no effect: this run never validates. Set trainer.test_freq to 0 "
            "or more, or trainer.val_before_train=true",
        ),
        (
            [*GRPO, "critic.optim.lr=1e-5"],
            "critic.optim.lr has no effect: this run has no critic, because "
            "algorithm.adv_estimator=grpo needs no value function",
        ),
        (
            [*GRPO, "placement=split"],
            "placement has no effect: this run has no role for critic_pool, so all roles share "
            "actor_rollout_ref_pool",
        ),
        (
            ["algorithm.bootstrap_truncated=true", NO_CRITIC],
            "algorithm.bootstrap_truncated has no effect: the advantage estimator that "
            "algorithm.adv_estimator names has no parameter truncated",
        ),
        (
            ["reward.list=[{name: a, retries: 2}]"],
            "reward.list[0].retries has no effect: reward.list[0].kind is not remote",
        ),
        (
            [*GRPO, "role_mapping.critic=global_pool", "role_workers.critic=some.Critic"],
            "role_workers.critic, role_mapping.critic have no effect: this run has no role "
            "'critic', because algorithm.adv_estimator=grpo needs no value function",
        ),
    ],
)
def test_the_notice_names_the_key_and_the_reason(
    settings: list[str], notice: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert notices(caplog, *settings) == [f"note: {notice}"]


def test_timed_checkpoints_read_the_number_to_keep(caplog: pytest.LogCaptureFixture) -> None:
    assert notices(caplog, "trainer.max_ckpt_to_keep=null") == []
    assert load_config([*NEEDED, "trainer.max_ckpt_to_keep=null"]).trainer.max_ckpt_to_keep is None


def test_keys_with_the_same_reason_share_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    (notice,) = notices(caplog, *GRPO, "critic.optim.lr=1e-5", "critic.grad_clip=2")
    assert notice.startswith("note: critic.optim.lr, critic.grad_clip have no effect: ")


def test_a_removed_key_has_no_notice(caplog: pytest.LogCaptureFixture) -> None:
    assert notices(caplog, NO_CRITIC, "critic.grad_clip=2", "~critic.grad_clip") == []
    assert len(notices(caplog, NO_CRITIC, "~critic.grad_clip", "critic.grad_clip=2")) == 1


@pytest.mark.parametrize("recipe", [SFT, REWARD_MODEL, DPO], ids=lambda recipe: recipe.name)
def test_row_recipes_have_notices(recipe: Recipe[Any], caplog: pytest.LogCaptureFixture) -> None:
    needed = ["data.train_files=train.parquet", "model.path=model", "trainer.test_freq=2"]
    expected = "note: trainer.test_freq has no effect: there are no data.val_files"
    assert notices(caplog, *needed, recipe=recipe) == [expected]
    assert notices(caplog, *needed, "data.val_files=val.parquet", recipe=recipe) == []


def test_rules_between_keys_skip_unread_keys() -> None:
    load_config([*NEEDED, *GRPO, "critic.ppo_mini_batch_size=7"])
    reference = "actor_rollout_ref.ref"
    load_config([*NEEDED, *GRPO, f"{reference}.update_every=2", f"{reference}.model.path=other"])


def test_samples_per_pass_of_a_missing_role_have_no_effect() -> None:
    key = "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4"
    assert load_config([*NEEDED, key]).actor_rollout_ref.actor.use_dynamic_bsz
    with_reference = load_config([*NEEDED, key, "algorithm.use_kl_in_reward=true"])
    assert not with_reference.actor_rollout_ref.actor.use_dynamic_bsz


UNREAD = "actor_rollout_ref.actor.kl_loss_coef=0.1"


def test_the_command_prints_the_notice_and_runs(tiny_dir: Path, tmp_path: Path) -> None:
    settings = ["trainer.backend=local", "trainer.dry_run=true", UNREAD]
    done = run_program(main_ppo.main, *overrides(tiny_dir, tmp_path, *settings), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("kl_loss_coef has no effect") == 1
