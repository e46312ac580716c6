"""Alarms of a step: numbers out of their band, each with what to look at.

The loop asks after every step and logs them. What stays so is said again after 10 steps, then 20,
40, ... The bands are those of the run's summary (`trainer.report.summary`), where it has one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.report.summary import ENTROPY_LEFT, KL_JUMP

ENTROPY_GROWN = 3.0
"""Times the first entropy: the policy forgets what it knew."""
PROBS_DIFF = 0.05
"""Mean difference of a token's probability between rollout and trainer."""
REFERENCE_KL = 10.0
"""Nats per token away from the reference, by which a policy writes another language."""
SAID_AGAIN = 10
"""Steps after which an alarm that stays is said a second time."""
logger = logging.getLogger(__name__)
Found = Iterator[tuple[str, str]]


class Alarms:
    """What has been said so far, and the numbers that a run began with.

    Both are kept in checkpoints; the attempts of a run share one (`trainer.launch`).
    """

    def __init__(self) -> None:
        """Nothing yet."""
        self._first: dict[str, float] = {}
        self._next: dict[str, tuple[int, int]] = {}
        """Kind of alarm -> the step from which on it is said again, and how many more after that.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON has it."""
        return {"first": dict(self._first), "next": {k: list(v) for k, v in self._next.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it; what has been said since in steps that are made again counts as said.

        An older checkpoint has none.
        """
        self._first |= state.get("first", {})
        for kind, (step, wait) in state.get("next", {}).items():
            self._next[kind] = max(self._next.get(kind, (0, 0)), (step, wait))

    def check(self, metrics: Mapping[str, float], step: int) -> list[str]:
        """Log the alarms of this step that were not said just now, and give them."""
        said = []
        for rule in (_skipped, self._entropy, _kl, _drift):
            for kind, text in rule(metrics):
                if self._is_due(kind, step):
                    said.append(f"alarm in step {step}: {text}")
                    logger.warning("%s", said[-1])
        return said

    def _is_due(self, kind: str, step: int) -> bool:
        at, wait = self._next.get(kind, (step, SAID_AGAIN))
        if step < at:
            return False
        self._next[kind] = step + wait, 2 * wait
        return True

    def _entropy(self, metrics: Mapping[str, float]) -> Found:
        entropy = metrics.get("actor/entropy", math.nan)
        first = self._first.setdefault("entropy", entropy)
        if math.isnan(first):
            self._first.pop("entropy")
        if first > 0 and entropy < ENTROPY_LEFT * first:
            yield (
                "entropy gone",
                f"actor/entropy is {entropy:.3g}, {first:.3g} at first: the policy says one thing. "
                "Look at the samples in rollouts/, then at actor.optim.lr, actor.entropy_coeff, "
                "and a KL to the reference.",
            )
        if first > 0 and entropy > ENTROPY_GROWN * first:
            yield (
                "entropy grown",
                f"actor/entropy is {entropy:.3g}, {first:.3g} at first: the policy comes apart. "
                "Look at the samples in rollouts/, at actor.optim.lr, and whether "
                "actor.entropy_coeff is too large.",
            )


def _skipped(metrics: Mapping[str, float]) -> Found:
    for name, skipped in metrics.items():
        role, _, what = name.rpartition("/")
        if what == "skipped_steps" and skipped > 0:
            yield (
                name,
                f"{skipped:g} updates of the {role} were skipped, their gradient was not finite. "
                f"Look at logs/{role}-0.log, which names the samples, at their rewards and "
                f"advantages, and at the learning rate.",
            )


def _kl(metrics: Mapping[str, float]) -> Found:
    moved = metrics.get("actor/ppo_kl", 0.0)
    if not abs(moved) <= KL_JUMP:
        yield (
            "actor/ppo_kl",
            f"actor/ppo_kl is {moved:.3g}: one step moves the policy by more than {KL_JUMP:g}. "
            "Look at actor.optim.lr, actor.ppo_epochs, and at training/rollout_probs_diff_mean.",
        )
    for name in ("actor/kl_loss", "actor/reward_kl_penalty"):
        away = metrics.get(name, 0.0)
        if not abs(away) <= REFERENCE_KL:
            yield (
                name,
                f"{name} is {away:.3g}: the policy is far from its reference. Look at the samples "
                "in rollouts/ for a reward that is gamed, and at the KL's coefficient.",
            )


def _drift(metrics: Mapping[str, float]) -> Found:
    apart = metrics.get("training/rollout_probs_diff_mean", 0.0)
    if not apart <= PROBS_DIFF:
        yield (
            "drift",
            f"training/rollout_probs_diff_mean is {apart:.3g}: rollout and trainer give the same "
            "token other probabilities. Look at rollout.dtype and rollout.quantization, how old "
            "the samples are (detached.max_staleness), and algorithm.rollout_correction.",
        )
