"""Alarms of a step: numbers out of their band, each with what to look at.

Which numbers, and what is said about them, are the recipe's rules (`Trainer.alarm_rules`). They are
asked after every step, and what they find is logged. An alarm that stays is logged again after 10
steps, then 20, 40, ...
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SAID_AGAIN = 10
"""Steps after which an alarm that stays is said a second time."""
logger = logging.getLogger(__name__)
Found = Iterator[tuple[str, str]]
"""(kind of alarm, what is said): of one kind, as long as it stays, one text is said rarely."""
AlarmRule = Callable[[Mapping[str, float], dict[str, float]], Found]
"""Gets the metrics of a step, and the numbers that rules keep from the run's first steps on."""


class Alarms:
    """The alarms that were logged so far, and the numbers that a run began with.

    Both are kept in the checkpoints of a recipe that has rules.
    """

    name = "alarms"

    def __init__(self, rules: Sequence[AlarmRule] = ()) -> None:
        self.rules = rules
        self._first: dict[str, float] = {}
        self._next: dict[str, tuple[int, int]] = {}
        """Kind of alarm -> the step from which on it is said again, and how many more after that.
        """

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, as JSON has it; nothing without rules."""
        if not self.rules:
            return {}
        return {"first": dict(self._first), "next": {k: list(v) for k, v in self._next.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with it; what has been said since in steps that are made again counts as said.

        An older checkpoint has none.
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
        """Log the alarms of this step that were not said just now, and give them."""
        said = []
        for rule in self.rules:
            for kind, text in rule(metrics, self._first):
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


def skipped_updates(
    metrics: Mapping[str, float], _first: dict[str, float], causes: str = ""
) -> Found:
    """Of a role that is trained by `workers.training`, for the rules of its recipe.

    `causes` are what of the recipe's own may be at fault, before the learning rate.
    """
    for name, skipped in metrics.items():
        role, _, what = name.rpartition("/")
        if what == "skipped_steps" and skipped > 0:
            yield (
                name,
                f"{skipped:g} updates of the {role} were skipped, their gradient was not finite. "
                f"Look at logs/{role}-0.log, which names the samples, {causes}and at the learning "
                "rate.",
            )
