"""A step on stubs says how many samples each call has, for every recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from trainer.async_training.recipe import ASYNC
from trainer.config import compose
from trainer.data.loader import RowLoader
from trainer.ppo.memory import sizes_of_step
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.preference.step import PreferenceTrainer
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from trainer.stubs import StubGroups, trace_step

ON_PROMPTS = ("data.train_files=x", "actor_rollout_ref.model.path=y")
ON_ROWS = ("data.train_files=x", "model.path=y")
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size={}"


def config_of(recipe: Any, *settings: str) -> Any:
    needed = ON_PROMPTS if recipe in (PPO, ASYNC) else ON_ROWS
    return compose.load_config([*needed, *settings], recipe)


def samples_of(config: Any) -> dict[str, int]:
    nodes, problem = trace_step(config)
    assert not problem
    return {node.name: node.samples for node in nodes if node.samples}


def test_the_same_tiny_step_stands_for_batches_of_other_sizes() -> None:
    for size in (64, 128):
        settings = (f"data.train_batch_size={size}", MINI.format(size // 2))
        samples = samples_of(config_of(PPO, *settings, "actor_rollout_ref.rollout.n=4"))
        assert {*samples.values()} == {4 * size}


@pytest.mark.parametrize(
    ("more", "of_a_call"),
    [
        ((), 1024),
        (("async_training.prompts_per_call=128",), 128),
        (("async_training.generators=3", "async_training.max_inflight_samples=12345"), 512),
    ],
)
def test_generators_get_their_shares_of_few_prompts(
    more: Sequence[str], of_a_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, rows = StubGroups.launch, []

    def noted(groups: StubGroups, *args: Any, **more: Any) -> int:
        rows.append(args[-1] if len(args) == 6 else 0)
        return launch(groups, *args, **more)

    monkeypatch.setattr(StubGroups, "launch", noted)
    settings = ("async_training.generators=2", "data.train_batch_size=2048", MINI.format(256))
    config = config_of(ASYNC, *settings, "algorithm=grpo", "actor_rollout_ref.rollout.n=2", *more)
    samples = samples_of(config)
    assert samples["rollout.submit"] == 2 * of_a_call
    assert samples["actor.update_actor"] == 2 * 2048
    assert 0 < max(rows) <= 2 * 16


def fails(token_level_rewards: Tensor, mine: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
    """An estimator of a column that no worker declares."""
    return token_level_rewards, mine


def test_a_model_has_full_passes_if_an_estimator_fails_on_stubs() -> None:
    name = f"algorithm.adv_estimator={__name__}.fails"
    config = config_of(PPO, name, "actor_rollout_ref.actor.ppo_mini_batch_size=64")
    nodes, problem = trace_step(config)
    assert "actor.update_actor" not in [node.name for node in nodes]
    assert problem
    sizes = {(size.role, size.trains): size.samples for size in sizes_of_step(config)}
    assert sizes["actor", True] == 64


@pytest.mark.parametrize(
    ("recipe", "loss", "calls"),
    [
        (SFT, "", {"sft.update_model"}),
        (REWARD_MODEL, "", {"reward_model.update_model"}),
        (DPO, "dpo", {"preference.compute_ref_log_prob", "preference.update_model"}),
        (DPO, "orpo", {"preference.update_model"}),
        (
            DPO,
            "kto",
            {
                "preference.compute_ref_log_prob",
                "preference.compute_log_prob",
                "preference.update_model",
            },
        ),
    ],
)
def test_recipes_on_rows_have_the_calls_of_their_steps(
    recipe: Any, loss: str, calls: set[str]
) -> None:
    more = [f"loss={loss}"] if loss else []
    samples = samples_of(config_of(recipe, "data.train_batch_size=48", *more))
    assert samples == dict.fromkeys(calls, 48)


class ScoresFirst(PreferenceTrainer):
    """Scores its rows before every update."""

    def with_columns(self, batch: Any) -> Any:
        with self.clock("mine"):
            self.groups["preference"].compute_log_prob(batch)
        return super().with_columns(batch)


def test_an_overridden_step_on_rows_shows_its_calls() -> None:
    nodes, problem = trace_step(config_of(DPO), ScoresFirst)
    assert not problem
    assert ("mine", "preference.compute_log_prob") in [node.key for node in nodes]


PTX = "ptx.train_files=x"
TEACHER = "distillation.teacher_model.model_path=y"
JUDGES = "reward.list=[{name: a, kind: model, path: y}, {name: b, kind: model, path: z}]"
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode={}"
ADDS_A_CALL = {
    "ptx": (PTX,),
    "ptx of another size": (PTX, "ptx.batch_size=3"),
    "teacher": (TEACHER,),
    "teacher and rewards": (TEACHER, "distillation.use_task_rewards=true"),
    "judge": ("reward.model.enable=true", "reward.model.path=y"),
    "judges": (JUDGES,),
    "filter of groups": ("algorithm.filter_groups.enable=true", "actor_rollout_ref.rollout.n=4"),
    "filter of scores": ("algorithm.use_pf_ppo=true",),
    "filter of lengths": ("algorithm.mask_truncated=true",),
    "correction that rejects": ("correction=decoupled_geo_rs",),
    "average of the actor": ("actor_rollout_ref.actor.ema_decay=0.9",),
    "average of the reference": (
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.ref.ema_decay=0.9",
        "actor_rollout_ref.ref.update_every=2",
    ),
    "chosen tokens": (LOSS.format("kl_cov"),),
    "running norms": ("algorithm.running_norm=[rewards,advantages]",),
    "a steered entropy": (
        "actor_rollout_ref.actor.target_entropy=0.5",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
    ),
    "baselines": ("algorithm=remax",),
    "int8 reference": (
        "algorithm.use_kl_in_reward=true",
        "actor_rollout_ref.ref.quantization=int8",
    ),
}


NOT_ASYNC = ("baselines",)
"""Settings that generators do not support."""


@pytest.mark.parametrize(
    ("recipe", "name"),
    [(PPO, name) for name in ADDS_A_CALL]
    + [(ASYNC, name) for name in ADDS_A_CALL if name not in NOT_ASYNC],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_setting_that_adds_a_call_has_a_whole_step(recipe: Any, name: str) -> None:
    samples = samples_of(config_of(recipe, "data.train_batch_size=8", *ADDS_A_CALL[name]))
    assert "actor.update_actor" in samples


def test_a_plan_without_code_of_the_user_never_lacks_a_call_in_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(self: RowLoader[Any], count: int) -> Any:
        raise AttributeError("next_batch")

    monkeypatch.setattr(RowLoader, "next_batch", broken)
    config = config_of(PPO, PTX, "ptx.batch_size=7")
    assert "next_batch" in trace_step(config)[1], "a run goes on"
    planned = config_of(PPO, PTX, "ptx.batch_size=7", "trainer.dry_run=true")
    with pytest.raises(AssertionError, match="PPOTrainer failed on stubs.*next_batch"):
        trace_step(planned)
