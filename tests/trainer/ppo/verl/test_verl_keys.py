"""verl's keys on the command line of `ppo`: ours, changing nothing, or refused with the way out."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from trainer import load_config
from trainer.config.keys import config_keys
from trainer.ppo.config import PPOConfig
from trainer.ppo.verl.keys import CHANGES_NOTHING, CHANGES_NOTHING_AT, NOT_HERE, RENAMED
from trainer.ppo.verl.overrides import fate_of, translate
from verl_like.errors import ConfigError

EXAMPLES = Path(__file__).with_name("example_keys.txt").read_text(encoding="utf-8").splitlines()
"""The keys of verl's scripts in examples/grpo_trainer and examples/ppo_trainer, with a value."""
KEYS = {key.name for key in config_keys(PPOConfig)}
NEEDED = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local"]


def test_every_key_of_verls_examples_has_a_fate() -> None:
    assert [example for example in EXAMPLES if fate_of(*example.split("=", 1)) is None] == []


def test_most_keys_of_verls_examples_are_accepted() -> None:
    fates = [fate_of(*example.split("=", 1)) for example in EXAMPLES if ".megatron." not in example]
    accepted = [fate for fate in fates if fate is not None and not fate.refused]
    assert len(accepted) / len(fates) >= 0.85


def test_a_key_of_ours_is_never_called_foreign() -> None:
    for key in KEYS:
        fate = fate_of(key, "1")
        assert fate is not None
        assert fate.key == key


def test_names_of_older_versions_lead_to_keys_of_ours() -> None:
    assert {name: ours for name, ours in RENAMED.items() if ours not in KEYS} == {}
    assert KEYS.isdisjoint(RENAMED)


def test_no_key_stands_in_two_tables() -> None:
    tables = [*CHANGES_NOTHING, *CHANGES_NOTHING_AT, *NOT_HERE, *RENAMED]
    assert len(set(tables)) == len(tables)


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
    with caplog.at_level(logging.WARNING, logger="trainer.ppo.verl"):
        settings = translate(script)
    assert settings == [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.actor.strategy=fsdp",
        "actor_rollout_ref.model.attn_implementation=sdpa",
        "trainer.val_before_train=False",
        "trainer.max_ckpt_to_keep=3",
        "ray.runtime_env.env_vars.A=b",
    ]
    (notice,) = caplog.messages
    assert "trainer.max_actor_ckpt_to_keep is trainer.max_ckpt_to_keep" in notice
    assert "data.return_raw_chat: chats are kept" in notice

    config = load_config(
        [*NEEDED, "algorithm=grpo", *script[1:5], "+trainer.val_before_train=False"]
    )
    assert config.actor_rollout_ref.actor.strategy == "fsdp"


def test_all_that_has_no_counterpart_is_refused_at_once_with_the_way_out() -> None:
    script = [
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "trainer.val_only=True",
    ]
    with pytest.raises(ConfigError, match="(?s)sharded by FSDP.*not cut over devices.*steps once"):
        load_config([*NEEDED, *script])


def test_a_key_that_nobody_has_is_still_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'data.train_batch_size'"):
        load_config([*NEEDED, "data.train_batch_sise=4"])
