"""verl's keys on the command line of `ppo`: translated, without effect, or rejected with advice."""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from trainer import load_config
from trainer.config.keys import named_keys
from trainer.config.settings import parse
from trainer.ppo import verl_keys
from trainer.ppo.config import PPOConfig
from trainer.ppo.verl_keys import our_key, tables, translate_key
from verl_like.errors import ConfigError
from workers.config import critic_optim


def translate(settings: list[str]) -> list[str]:
    """Return the settings in our keys, as text."""
    return [str(setting.input_line) for setting in verl_keys.translate(map(parse, settings))]


EXAMPLES = (
    Path(__file__).with_name("verl_example_keys.txt").read_text(encoding="utf-8").splitlines()
)
"""The keys of verl's scripts in examples/grpo_trainer and examples/ppo_trainer, with a value."""
KEYS = set(named_keys(PPOConfig))
NEEDED = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local"]


def test_every_key_of_verls_examples_is_known() -> None:
    assert [example for example in EXAMPLES if translate_key(*example.split("=", 1)) is None] == []


@pytest.mark.parametrize(
    "settings",
    [
        "custom_reward_function.path=f.py custom_reward_function.name=score "
        "custom_reward_function.reward_kwargs.bonus=1 reward_model.enable=True "
        "reward_model.model.path=m reward_model.micro_batch_size_per_gpu=3 "
        "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.log=False",
        "custom_reward_function={path:f.py,name:score,reward_kwargs:{bonus:1}} "
        "reward_model={enable:True,model:{path:m},micro_batch_size_per_gpu:3} "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=True",
        "reward.custom_reward_function.path=f.py reward.custom_reward_function.name=score "
        "reward.custom_reward_function.reward_kwargs.bonus=1 reward.reward_model.enable=True "
        "reward.reward_model.model_path=m reward.reward_model.micro_batch_size_per_gpu=3 "
        "reward.num_workers=8 reward.reward_kwargs.overlong_buffer_cfg.enable=True",
    ],
    ids=["names", "sections", "newer names"],
)
def test_rewards_accept_verls_names_of_every_version(settings: str) -> None:
    words = [*NEEDED, "actor_rollout_ref.rollout.n=2", "reward.overlong_penalty.len=8"]
    reward = load_config([*words, *settings.split()]).reward
    function, model = reward.function, reward.model
    assert (function.path, function.name, function.kwargs) == ("f.py", "score", {"bonus": 1})
    assert (model.enable, model.path, model.micro_batch_size_per_gpu) == (True, "m", 3)
    assert reward.overlong_penalty.enable


def test_own_keys_are_not_translated() -> None:
    for key in KEYS:
        outcome = translate_key(key, "1")
        assert outcome is not None
        assert outcome.key == key


def test_older_names_are_renamed_to_own_keys() -> None:
    assert {name: ours for name, ours in tables().renamed.items() if our_key(ours) != ours} == {}
    assert KEYS.isdisjoint(tables().renamed)


def test_no_key_is_in_two_tables() -> None:
    other = {name: table for name, table in vars(tables()).items() if name != "lays_out"}
    names = [name for table in other.values() for name in table]
    assert len(set(names)) == len(names)


def test_every_layout_key_is_rejected() -> None:
    rejected = [*tables().changes_nothing_at, *tables().not_here]
    for name in tables().lays_out:
        example = name.replace("*", "x")
        assert any(fnmatchcase(example, key) or fnmatchcase(key, name) for key in rejected), name


def test_verls_script_composes_with_one_notice(caplog: pytest.LogCaptureFixture) -> None:
    script = [
        "algorithm.adv_estimator=grpo",
        "data.return_raw_chat=True",
        "actor_rollout_ref.rollout.enforce_eager=False",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "+trainer.val_before_train=False",
        "trainer.max_actor_ckpt_to_keep=3",
        "critic.optim.weight_decay=0.01",
        "++ray_kwargs.ray_init.runtime_env.env_vars.A=b",
    ]
    with caplog.at_level(logging.WARNING, logger="trainer.ppo.verl_keys"):
        settings = translate(script)
    assert settings == [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.actor.parallel.sp=1",
        "actor_rollout_ref.model.attn_implementation=sdpa",
        "trainer.val_before_train=False",
        "trainer.max_ckpt_to_keep=3",
        "critic.optim.weight_decay=0.01",
        "ray.runtime_env.env_vars.A=b",
    ]
    (notice,) = caplog.messages
    assert "trainer.max_actor_ckpt_to_keep is trainer.max_ckpt_to_keep" in notice
    assert "data.return_raw_chat: chats are kept" in notice

    config = load_config([*NEEDED, "algorithm=grpo", *script[1:5], script[6]])
    assert config.actor_rollout_ref.actor.strategy == "fsdp"


def test_the_critics_optimizer_has_the_actors_settings_by_default() -> None:
    settings = ["critic.optim.weight_decay=0.1", "actor_rollout_ref.actor.optim.eps=1e-6"]
    optim = critic_optim(load_config([*NEEDED, *settings]))
    assert (optim.weight_decay, optim.eps, optim.lr) == (0.1, 1e-6, 1e-5)


@pytest.mark.parametrize("section", ["actor_rollout_ref.actor.optim", "critic.optim"])
def test_a_ratio_of_warm_up_counts_if_no_steps_are_set(section: str) -> None:
    ratio, steps = f"{section}.lr_warmup_steps_ratio=0.1", f"{section}.lr_warmup_steps=5"
    assert translate([ratio]) == [ratio, f"{section}.lr_warmup_steps=-1"]
    assert translate([ratio, steps]) == [ratio, steps]


def test_all_keys_without_a_counterpart_are_rejected_at_once() -> None:
    script = [
        "actor_rollout_ref.actor.megatron.override_transformer_config.moe_aux_loss_coeff=0.1",
        "actor_rollout_ref.model.mtp.enable=True",
        "trainer.val_only=True",
    ]
    with pytest.raises(
        ConfigError,
        match="(?s)router_aux_loss_coef.*multi-token prediction is not trained.*verl-like eval",
    ):
        load_config([*NEEDED, *script])


def test_layout_keys_are_dropped_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    script = [
        "actor_rollout_ref.actor.megatron.sequence_parallel=true",
        "actor_rollout_ref.model.trust_remote_code=True",
    ]
    assert translate(script) == []
    (notice,) = caplog.messages
    assert "sequence_parallel=true is left out: FSDP and `parallel` shard" in notice
    assert "trust_remote_code=True is left out" in notice


RANKS = "trainer.n_gpus_per_node=8 trainer.nnodes=2"


@pytest.mark.parametrize(
    ("settings", "last"),
    [
        ("{}.ppo_micro_batch_size=64", "{}.ppo_micro_batch_size_per_gpu=64"),
        (RANKS + " {}.ppo_micro_batch_size=64", "{}.ppo_micro_batch_size_per_gpu=4"),
        (
            RANKS + " {0}.ulysses_sequence_parallel_size=2 {0}.ppo_micro_batch_size=64",
            "{}.ppo_micro_batch_size_per_gpu=8",
        ),
        ("{}.fsdp_config.fsdp_size=32", "{}.fsdp_config.fsdp_size=32"),
        (
            "{0}.ulysses_sequence_parallel_size=4 {0}.fsdp_config.fsdp_size=32",
            "{}.fsdp_config.fsdp_size=8",
        ),
    ],
)
def test_sizes_of_all_ranks_become_sizes_per_rank(settings: str, last: str) -> None:
    actor = "actor_rollout_ref.actor"
    assert translate(settings.format(actor).split())[-1] == last.format(actor)


def test_keys_within_a_section_are_translated() -> None:
    section = ["actor_rollout_ref.actor.fsdp_config={forward_prefetch: True, fsdp_size: 2}"]
    assert translate(section) == ["actor_rollout_ref.actor.fsdp_config.fsdp_size=2"]


def test_a_penalty_length_other_than_the_response_length_is_rejected() -> None:
    key = "reward_model.reward_kwargs.max_resp_len"
    assert translate([f"{key}=9", "data.max_response_length=9"]) == ["data.max_response_length=9"]
    with pytest.raises(ConfigError, match=r"ends at data\.max_response_length"):
        translate([f"{key}=9", "data.max_response_length=8"])


def test_only_a_users_configurations_are_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert verl_keys.settings_of_configuration("ppo_megatron_trainer.yaml", "config") == []
    assert "is a configuration of verl and is not read" in caplog.text
    text = "defaults: [ppo_trainer, base, _self_]\nactor_rollout_ref:\n  rollout: {n: 4}\n"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "base.yaml").write_text("trainer: {total_epochs: 2}\n")
    settings = ["trainer.total_epochs=2", "actor_rollout_ref.rollout.n=4"]
    assert verl_keys.settings_of_configuration("mine", str(tmp_path)) == settings
    with pytest.raises(ConfigError, match=r"there is no .*other\.yaml.*folder of the script"):
        verl_keys.settings_of_configuration("other", str(tmp_path))


def test_sizes_of_megatron_become_the_axes_of_each_role() -> None:
    sizes = ("tensor_model=2", "context=3", "pipeline_model=1", "expert_model=1")
    for role in ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic"):
        names = [f"{role}.megatron.{size.replace('=', '_parallel_size=')}" for size in sizes]
        ours = [f"{role}.parallel.{size}" for size in ("tp=2", "sp=3", "pp=1", "ep=1")]
        assert translate(names) == ours
    assert translate(["critic.strategy=megatron"]) == ["critic.strategy=fsdp"]
