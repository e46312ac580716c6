"""Faults injected into environments (`faults.kill_environment`, `faults.delay_environment`).

The seed, the trajectory's noise key and the index of the reply determine which replies get a fault,
independently of rank and time. Faults affect only the first attempt of a trajectory, so after a
restart it runs without faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

KINDS = KILL, DELAY = "kill_environment", "delay_environment"


@dataclass(frozen=True)
class Faults:
    """The probability that a reply gets each kind of fault, the length of a delay, and the seed."""

    kill_environment: float = 0.0
    delay_environment: float = 0.0
    delay_s: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, settings: Any) -> Faults:
        """Read the section `faults`; a recipe without these keys has no faults."""
        if not hasattr(settings, "kill_environment"):
            return cls()
        return cls(
            settings.kill_environment, settings.delay_environment, settings.delay_s, settings.seed
        )

    def strike(self, kind: str, key: int, answer: int) -> bool:
        """Return True if this reply gets a fault of this kind."""
        chance: float = getattr(self, kind)
        return chance > 0 and Random(f"{self.seed}/{kind}/{key}/{answer}").random() < chance


NO_FAULTS = Faults()
