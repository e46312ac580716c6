"""A migrated command has verl's loss: its aggregation, its bounds and its arguments.

The losses themselves have twins in `tests/workers/losses`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.trainer.tools.migrate.words import translated_whole
from trainer.config.schema import RunConfig
from trainer.ppo.recipe import load_config
from verl_like.config_key import settable_arguments
from workers.losses.registry import POLICY_LOSSES, clip_range

Settings = Mapping[str, float]
ACTOR = "actor_rollout_ref.actor"
DEFAULTS: Settings = {
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.2,
    "clip_ratio_c": 3.0,
    "tau_pos": 1.0,
    "tau_neg": 1.05,
    "clip_cov_ratio": 0.0002,
    "clip_cov_lb": 1.0,
    "clip_cov_ub": 5.0,
    "kl_cov_ratio": 0.0002,
    "ppo_kl_coef": 0.1,
}
"""verl's defaults; `dro_beta` has none."""
MODES = (
    *("", "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"),
    *("seq-mean-token-sum-norm", "token-sum"),
)
"""The values of a command; without one, it is token-mean in verl."""
OF_ROWS = ("sapo", "geo_mean")
"""Losses that verl averages over rows, whatever the command says."""
LOSSES = [*POLICY_LOSSES.keys() - {"gmpo", "luspo", "reinforce", "dro"}]
"""Losses of verl that need no argument."""
CASES: list[tuple[str, Settings]] = [
    *((name, {}) for name in sorted(LOSSES)),
    ("vanilla", {f"{ACTOR}.clip_ratio": 0.05}),
    ("vanilla", {f"{ACTOR}.clip_ratio": 0.05, f"{ACTOR}.clip_ratio_high": 0.4}),
    ("gspo", {f"{ACTOR}.clip_ratio_low": 0.01, f"{ACTOR}.clip_ratio_high": 0.02}),
    ("sapo", {f"{ACTOR}.tau_pos": 2.0, f"{ACTOR}.tau_neg": 3.0}),
    ("dro", {f"{ACTOR}.policy_loss.dro_beta": 0.3}),
    ("kl_cov", {f"{ACTOR}.policy_loss.ppo_kl_coef": 0.5}),
    ("clip_cov", {f"{ACTOR}.policy_loss.clip_cov_lb": 0.1}),
]


def migrated(loss: str, mode: str, settings: Settings) -> RunConfig:
    words = [
        "data.train_files=x actor_rollout_ref.model.path=y algorithm.adv_estimator=grpo",
        f"actor_rollout_ref.rollout.n=2 {ACTOR}.policy_loss.loss_mode={loss}",
        *(f"{key}={value}" for key, value in settings.items()),
        *([f"{ACTOR}.loss_agg_mode={mode}"] if mode else []),
    ]
    return load_config(translated_whole("verl", " ".join(words)).overrides())


@pytest.mark.parametrize(
    ("loss", "settings", "mode"),
    [
        *(("vanilla", {}, mode) for mode in MODES),
        *((*case, MODES[number % len(MODES)]) for number, case in enumerate(CASES)),
    ],
)
def test_a_migrated_command_has_verls_loss(loss: str, settings: Settings, mode: str) -> None:
    actor = migrated(loss, mode, settings).actor_rollout_ref.actor
    assert actor.policy_loss.loss_mode == loss
    expected_mode = "seq-mean-token-mean" if loss in OF_ROWS else mode or "token-mean"
    assert actor.loss_agg_mode == expected_mode
    expected = DEFAULTS | {key.rpartition(".")[2]: value for key, value in settings.items()}
    low, high = clip_range(actor)
    bounds = {"clip_ratio_low": 1 - low, "clip_ratio_high": high - 1}
    bounds["clip_ratio_c"] = actor.clip_ratio_c
    arguments = settable_arguments(POLICY_LOSSES[loss])
    defaults = {name: argument.default for name, argument in arguments.items()}
    used = bounds | defaults | actor.policy_loss.args
    assert used == pytest.approx({name: expected[name] for name in used})


def test_differences_from_verl_s_loss_are_noted() -> None:
    base = "data.train_files=x actor_rollout_ref.model.path=y actor_rollout_ref.rollout.n=2"
    base += " actor_rollout_ref.rollout.name=vllm"

    def notes(words: str) -> str:
        done = translated_whole("verl", f"{base} {words}")
        return "\n".join([*done.renamed, *done.absent, *done.unread])

    loss = f"{ACTOR}.policy_loss.loss_mode"
    assert "in verl, per micro-batch by the new ones" in notes(f"{loss}=kl_cov")
    assert "in verl, per micro-batch by the new ones" in notes(f"{loss}=clip_cov")
    assert "older verl" in notes(f"{loss}=gspo")
    assert f"{ACTOR}.clip_ratio=0.1" in notes(f"{ACTOR}.clip_ratio=0.1")
    weighed = "algorithm.rollout_correction.rollout_is=token"
    assert "geometric mean" in notes(f"{loss}=geo_mean {weighed}")
    assert "entropy and KL" in notes(f"{loss}=sapo {ACTOR}.entropy_coeff=0.01")
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    assert f"{loss}=vanilla" in notes(f"{loss}=gspo {bypass}")


def test_the_critic_has_verl_s_aggregation() -> None:
    done = translated_whole(
        "verl",
        "data.train_files=x actor_rollout_ref.model.path=y critic.model.path=y "
        f"{ACTOR}.policy_loss.loss_mode=sapo",
    )
    config = load_config(done.overrides())
    assert config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"
    assert config.critic.loss_agg_mode == "token-mean"
