"""Faults of environments on purpose (`chaos.kill_environment`, `chaos.delay_environment`).

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
    def of(cls, chaos: Any) -> Faults:
        """As the section `chaos` has them; none of a recipe without such keys."""
        if not hasattr(chaos, "kill_environment"):
            return cls()
        return cls(chaos.kill_environment, chaos.delay_environment, chaos.delay_s, chaos.seed)

    def strike(self, kind: str, key: int, answer: int) -> bool:
        """Whether this answer has a fault of this kind."""
        chance = getattr(self, kind)
        return chance > 0 and Random(f"{self.seed}/{kind}/{key}/{answer}").random() < chance


NO_FAULTS = Faults()
