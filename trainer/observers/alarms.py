"""Alarms of a step: metrics outside their normal range, each with advice.

The recipe's rules (`RunRecipe.alarm_rules`) define the metrics and the advice. They are applied
after every step, and alarms are logged. An alarm that persists is logged again after 10 steps, then
20, 40, ...

PPO's rules watch skipped updates, the entropy, scores that are all 0, the KL, and the gap between
rollout and trainer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

FIRST_REPEAT = 10
"""Number of steps after which an alarm that persists is logged again."""
ENTROPY_LEFT, KL_JUMP = 0.05, 0.2
"""Limits of PPO's rules and of the run's summary: a fraction of the first entropy, and nats."""
logger = logging.getLogger(__name__)
AlarmTexts = Iterator[tuple[str, str]]
"""Yields (kind of alarm, text). While a kind persists, its texts are logged less and less often."""
AlarmRule = Callable[[Mapping[str, float], dict[str, float]], AlarmTexts]
"""Takes the metrics of one step, and the numbers that rules store from the run's first steps."""


class Alarms:
    """Applies the rules after every step, and logs the alarms.

    Checkpoints store which alarms were logged, and the metrics of the run's first steps.
    """

    name = "alarms"

    def __init__(self, rules: Sequence[AlarmRule] = ()) -> None:
        self.rules = rules
        self._first: dict[str, float] = {}
        self._next: dict[str, tuple[int, int]] = {}
        """Maps a kind of alarm to (step from which it is logged again, number of steps to wait
        after that)."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state, ready for JSON; {} if there are no rules."""
        if not self.rules:
            return {}
        return {"first": dict(self._first), "next": {k: list(v) for k, v in self._next.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; alarms that repeated steps have logged since then count as logged.

        Checkpoints of older versions have no such state.
        """
        if not self.rules:
            return
        self._first |= state.get("first", {})
        for kind, (step, wait) in state.get("next", {}).items():
            self._next[kind] = max(self._next.get(kind, (0, 0)), (step, wait))

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Log the alarms of the step."""
        self.check(metrics, trainer.global_step)

    def check(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Log and return the alarms of this step that were not logged recently."""
        texts = []
        for rule in self.rules:
            for kind, text in rule(metrics, self._first):
                due, wait = self._next.get(kind, (step, FIRST_REPEAT))
                if step >= due:
                    self._next[kind] = step + wait, 2 * wait
                    texts.append(f"alarm in step {step}: {text}")
                    logger.warning("%s", texts[-1])
        return texts


def skipped_updates(
    metrics: Mapping[str, float], _first: dict[str, float], causes: str = ""
) -> AlarmTexts:
    """Report skipped updates of any trained role; recipes use this in their rules.

    `causes` names possible causes to look at before the learning rate.
    """
    for name, skipped in metrics.items():
        role, _, metric = name.rpartition("/")
        if metric == "skipped_steps" and skipped > 0:
            yield (
                name,
                f"the {role} skipped {skipped:g} of its updates, because the gradient was not "
                f"finite. Look at logs/{role}-0.log, which names the samples, {causes}and at the "
                "learning rate.",
            )


LEAST_CHANGED = 0.005
"""Below this fraction of changed weights, an alarm is raised."""
LR_LEFT = 0.01
"""Below this multiple of the largest learning rate, the schedule explains small changes."""


def unchanged_weights(metrics: Mapping[str, float], first: dict[str, float]) -> AlarmTexts:
    """Report updates of any trained role that changed (almost) no weight."""
    for name, fraction in metrics.items():
        role, _, metric = name.rpartition("/")
        if metric != "weights_changed_fraction" or metrics.get(f"{role}/skipped_steps", 0) > 0:
            continue
        lr = metrics.get(f"{role}/lr", 0.0)
        largest = first[f"{role}/lr"] = max(lr, first.get(f"{role}/lr", 0.0))
        if fraction < LEAST_CHANGED and lr > LR_LEFT * largest:
            yield (
                name,
                f"an update of the {role} changed {fraction:.2%} of its weights at a learning rate "
                f"of {lr:g}. Either the gradient is zero, for example because all advantages are, "
                "or the learning rate is too small for the dtype of the weights.",
            )


ENTROPY_GROWN = 3.0
"""Above this multiple of the first entropy, an alarm is raised: the policy becomes random."""
FAR_FROM_REFERENCE = (
    "the policy is far from its reference. Look at the samples in rollouts/ for a reward that is "
    "gamed, and at the KL coefficient."
)
LARGEST: dict[str, tuple[float, str]] = {
    "actor/ppo_kl": (
        KL_JUMP,
        f"one step moves the policy by a KL of more than {KL_JUMP:g}. Look at "
        "actor_rollout_ref.actor.optim.lr and actor_rollout_ref.actor.ppo_epochs, and "
        "at training/rollout_probs_diff_mean.",
    ),
    "actor/kl_loss": (10.0, FAR_FROM_REFERENCE),  # nats; by then the text has degenerated
    "actor/reward_kl_penalty": (10.0, FAR_FROM_REFERENCE),
    "training/rollout_probs_diff_mean": (
        0.05,
        "rollout and trainer assign different probabilities to the same token. Look at "
        "actor_rollout_ref.rollout.dtype and actor_rollout_ref.rollout.quantization, "
        "how old the samples are (async_training.max_staleness), and "
        "algorithm.rollout_correction.",
    ),
}
"""Maps a metric to (largest normal absolute value, advice for larger values)."""


def skipped_updates_of_ppo(metrics: Mapping[str, float], first: dict[str, float]) -> AlarmTexts:
    """Report skipped updates; for actor and critic, rewards and advantages may be the cause."""
    return skipped_updates(metrics, first, "at their rewards and advantages, ")


def entropy(metrics: Mapping[str, float], first: dict[str, float]) -> AlarmTexts:
    """Report an entropy that is very small or very large compared with the run's first one."""
    now = metrics.get("actor/entropy", math.nan)
    at_first = first.setdefault("entropy", now)
    if math.isnan(at_first):
        first.pop("entropy")
    if at_first > 0 and now < ENTROPY_LEFT * at_first:
        yield (
            "entropy gone",
            f"actor/entropy is {now:.3g} (initially {at_first:.3g}): the policy repeats one "
            "response. Look at the samples in rollouts/, then at actor_rollout_ref.actor.optim.lr, "
            "actor_rollout_ref.actor.entropy_coeff, and a KL to the reference.",
        )
    if at_first > 0 and now > ENTROPY_GROWN * at_first:
        yield (
            "entropy grown",
            f"actor/entropy is {now:.3g} (initially {at_first:.3g}): the policy becomes random. "
            "Look at the samples in rollouts/, at actor_rollout_ref.actor.optim.lr, and whether "
            "actor_rollout_ref.actor.entropy_coeff is too large.",
        )


ZERO_STEPS = 3
"""Number of successive steps without any reward that raise an alarm."""


def zero_scores(metrics: Mapping[str, float], first: dict[str, float]) -> AlarmTexts:
    """Report that every sample of the last steps had the score 0; a teacher may replace rewards."""
    is_zero = metrics.get("critic/score/min") == metrics.get("critic/score/max") == 0
    if not is_zero or "distillation/reverse_kl" in metrics:
        first.pop("zero_scores", None)
        return
    first["zero_scores"] = first.get("zero_scores", 0) + 1
    if first["zero_scores"] >= ZERO_STEPS:
        yield (
            "zero scores",
            f"every sample of the last {first['zero_scores']:g} steps had the score 0, so there is "
            "nothing to learn from. Check the reward function against the samples in rollouts/.",
        )


def large_kl(metrics: Mapping[str, float], _: dict[str, float]) -> AlarmTexts:
    """Report a policy that moved far in one step, or is far from the reference or the rollout."""
    for name, (largest, story) in LARGEST.items():
        value = metrics.get(name, 0.0)
        if not abs(value) <= largest:
            yield name, f"{name} is {value:.3g}: {story}"


ALARM_RULES = (skipped_updates_of_ppo, unchanged_weights, entropy, zero_scores, large_kl)
