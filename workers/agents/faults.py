"""Faults of environments on purpose (`faults.kill_environment`, `faults.delay_environment`).

Which answers they strike follows from the seed, the trajectory's noise key and the answer's number:
whoever plays it, and whenever. They strike the first environment of a trajectory alone, so that the
next one plays on undisturbed.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

KINDS = KILL, DELAY = "kill_environment", "delay_environment"


@dataclass(frozen=True)
class Faults:
    """How likely which fault is for an answer."""

    kill_environment: float = 0.0
    delay_environment: float = 0.0
    delay_s: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, settings: Any) -> Faults:
        """As the section `faults` has them; none of a recipe without such keys."""
        if not hasattr(settings, "kill_environment"):
            return cls()
        return cls(
            settings.kill_environment,
            settings.delay_environment,
            settings.delay_s,
            settings.seed,
        )

    def strike(self, kind: str, key: int, answer: int) -> bool:
        """Whether this answer has a fault of this kind."""
        chance = getattr(self, kind)
        return chance > 0 and Random(f"{self.seed}/{kind}/{key}/{answer}").random() < chance


NO_FAULTS = Faults()
