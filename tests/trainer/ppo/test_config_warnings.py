"""Contradictory keys are rejected, or get a named warning."""

from __future__ import annotations

import logging

import pytest

from trainer import load_config
from verl_like.errors import ConfigError

NEEDED = ["data.train_files=x", "actor_rollout_ref.model.path=y", "trainer.backend=local"]
GRPO = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8"
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
KL_IN_REWARD = "algorithm.use_kl_in_reward=true"

ERRORS = [
    (
        f"{GRPO} actor_rollout_ref.rollout.do_sample=false",
        ["same greedy response", "learns from their differences"],
    ),
    (
        "algorithm.adv_estimator=remax actor_rollout_ref.rollout.do_sample=false",
        ["adv_estimator=remax", "do_sample=true"],
    ),
    (
        "algorithm.filter_groups.enable=true",
        ["filter_groups.enable=true with actor_rollout_ref.rollout.n=1", "n to 2 or more"],
    ),
    (
        f"{KL_IN_REWARD} algorithm.kl_penalty=k3+",
        ["a reward has no gradient", "Set algorithm.kl_penalty=k3."],
    ),
    (
        f"{KL_IN_REWARD} algorithm.kl_ctrl.type=adaptive algorithm.kl_ctrl.kl_coef=0",
        ["multiplies the coefficient, so it stays 0", "such as 0.001"],
    ),
    (
        "trainer.critic_warmup=5 trainer.total_training_steps=5",
        ["critic_warmup=5 of trainer.total_training_steps=5", "the actor never trains"],
    ),
]

WARNINGS = [
    (
        f"{GRPO} {LOSS_MODE}=gspo actor_rollout_ref.actor.clip_ratio=3e-4",
        "sequence-aggregation",
        ["loss_agg_mode=token-mean counts it once per token", "seq-mean-token-mean"],
    ),
    (
        f"{GRPO} {LOSS_MODE}=gspo actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        "clip-of-sequences",
        ["0.2 below and 0.2 above", "clip_ratio_low=3e-4"],
    ),
    (
        f"{GRPO} {LOSS_MODE}=geo_mean",
        "sequence-aggregation",
        ["loss_mode=geo_mean computes one ratio", "seq-mean-token-mean"],
    ),
    (f"{GRPO} {LOSS_MODE}=luspo", "clip-of-sequences", ["loss_mode=luspo clips"]),
    (
        f"{GRPO} actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm",
        "half-of-dr-grpo",
        ["norm_adv_by_std_in_grpo=false", "algorithm=dr_grpo"],
    ),
    (
        f"{GRPO} {LOSS_MODE}=reinforce data.train_batch_size=64 "
        "actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_epochs=2",
        "uncorrected-updates",
        ["a step makes 8 updates", "ppo_mini_batch_size=64 and"],
    ),
    (
        "actor_rollout_ref.actor.clip_ratio_low=0.28 actor_rollout_ref.actor.clip_ratio_high=0.2",
        "clip-upside-down",
        ["clip_ratio_low=0.28 is above actor_rollout_ref.actor.clip_ratio_high=0.2", "swapped"],
    ),
    (
        "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0",
        "kl-zero-coef",
        ["kl_loss_coef=0", "only for a metric"],
    ),
    (
        f"{KL_IN_REWARD} algorithm.kl_ctrl.kl_coef=0",
        "kl-zero-coef",
        ["kl_ctrl.kl_coef=0", "only for a metric"],
    ),
    (
        f"{KL_IN_REWARD} actor_rollout_ref.actor.use_kl_loss=true",
        "kl-twice",
        ["in the reward and in the loss", "Keep one"],
    ),
    (
        "actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_type=k1",
        "kl-without-gradient",
        ["kl_loss_type=k1", "kl_loss_type=k1+, k2 or low_var_kl"],
    ),
    (f"{GRPO} {KL_IN_REWARD}", "kl-in-group-reward", ["adv_estimator=grpo", "use_kl_loss=true"]),
]

NO_WARNINGS = [
    "",
    f"{GRPO} {LOSS_MODE}=reinforce "
    "actor_rollout_ref.actor.ppo_mini_batch_size=${data.train_batch_size}",
    f"{LOSS_MODE}=cispo actor_rollout_ref.actor.clip_ratio_low=1 "
    "actor_rollout_ref.actor.clip_ratio_high=0.2",
    f"{LOSS_MODE}=luspo actor_rollout_ref.actor.clip_ratio=3e-4",
    f"{KL_IN_REWARD} algorithm.adv_estimator=rloo actor_rollout_ref.rollout.n=8",
]
"""The defaults, one update per step, and settings that contradict only other algorithms."""


def warnings_of(caplog: pytest.LogCaptureFixture, *overrides: str) -> list[str]:
    """Return the named warnings of a configuration."""
    with caplog.at_level(logging.WARNING, "trainer.config.compose"):
        load_config([*NEEDED, *overrides])
    return [text for text in caplog.messages if text.startswith("warning [")]


@pytest.mark.parametrize(("overrides", "parts"), ERRORS, ids=[overrides for overrides, _ in ERRORS])
def test_settings_that_can_teach_nothing_are_rejected(overrides: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*NEEDED, *overrides.split()])
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "name", "parts"), WARNINGS, ids=[f"{w[1]}: {w[0]}" for w in WARNINGS]
)
def test_a_contradiction_gets_a_named_warning(
    overrides: str, name: str, parts: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    (text,) = warnings_of(caplog, *overrides.split())
    assert text.startswith(f"warning [{name}]: ")
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize("overrides", NO_WARNINGS)
def test_consistent_settings_get_no_warning(
    overrides: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(caplog, *overrides.split()) == []
