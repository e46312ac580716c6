"""The alarms of PPO: entropy, KL, and a rollout whose policy differs from the trainer's.

`trainer.roadside.alarms` applies these rules after every step. They use the thresholds of the run's
summary (`trainer.report.summary`) where it has any.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainer.report.summary import ENTROPY_LEFT, KL_JUMP
from trainer.roadside.alarms import AlarmTexts, skipped_updates

ENTROPY_GROWN = 3.0
"""The alarm's multiple of the first entropy: above it the policy loses what it has learned."""
FAR_FROM_REFERENCE = (
    "the policy is far from its reference. Look at the samples in rollouts/ for a reward that is "
    "gamed, and at the KL's coefficient."
)
LARGEST: dict[str, tuple[float, str]] = {
    "actor/ppo_kl": (
        KL_JUMP,
        f"one step moves the policy by more than {KL_JUMP:g}. Look at actor.optim.lr, "
        "actor.ppo_epochs, and at training/rollout_probs_diff_mean.",
    ),
    "actor/kl_loss": (10.0, FAR_FROM_REFERENCE),  # by so many nats it writes another language
    "actor/reward_kl_penalty": (10.0, FAR_FROM_REFERENCE),
    "training/rollout_probs_diff_mean": (
        0.05,
        "rollout and trainer give the same token other probabilities. Look at rollout.dtype and "
        "rollout.quantization, how old the samples are (async_training.max_staleness), and "
        "algorithm.rollout_correction.",
    ),
}
"""Metric -> its largest normal size, and the advice for a larger one."""


def skipped(metrics: Mapping[str, float], first: dict[str, float]) -> AlarmTexts:
    """Report skipped updates; for actor and critic, rewards and advantages may be the cause."""
    return skipped_updates(metrics, first, "at their rewards and advantages, ")


def entropy(metrics: Mapping[str, float], first: dict[str, float]) -> AlarmTexts:
    """Report an entropy that has become very small or very large against the run's first one."""
    now = metrics.get("actor/entropy", math.nan)
    at_first = first.setdefault("entropy", now)
    if math.isnan(at_first):
        first.pop("entropy")
    if at_first > 0 and now < ENTROPY_LEFT * at_first:
        yield (
            "entropy gone",
            f"actor/entropy is {now:.3g}, {at_first:.3g} at first: the policy says one thing. "
            "Look at the samples in rollouts/, then at actor.optim.lr, actor.entropy_coeff, "
            "and a KL to the reference.",
        )
    if at_first > 0 and now > ENTROPY_GROWN * at_first:
        yield (
            "entropy grown",
            f"actor/entropy is {now:.3g}, {at_first:.3g} at first: the policy comes apart. "
            "Look at the samples in rollouts/, at actor.optim.lr, and whether "
            "actor.entropy_coeff is too large.",
        )


def distances(metrics: Mapping[str, float], _: dict[str, float]) -> AlarmTexts:
    """Report a policy that moved far in one step or is far from the reference or the rollout."""
    for name, (largest, story) in LARGEST.items():
        value = metrics.get(name, 0.0)
        if not abs(value) <= largest:
            yield name, f"{name} is {value:.3g}: {story}"


ALARM_RULES = (skipped, entropy, distances)
