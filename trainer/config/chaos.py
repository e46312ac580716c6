"""The section `chaos`: faults on purpose, which `trainer.chaos` brings about.

These are the faults that any recipe can have; a recipe with others extends the section
(`trainer.ppo.config`) and says how they come about (`Trainer.own_faults`).
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_like.config_key import When, key, unless

HAS_FAULTS = When(
    "`chaos.kill_worker` or `chaos.delay` is above 0",
    lambda _, run: run.chaos.has_faults,
    "chaos.kill_worker and chaos.delay are 0, so there are no faults",
)


@dataclass(kw_only=True)
class ChaosConfig:
    """How often which fault comes: chances per step."""

    kill_worker: float = key(0.0, at_least=0, at_most=1)
    """Chance that a step begins with the death of a worker process, of a random pool."""
    delay: float = key(0.0, at_least=0, at_most=1)
    """Chance that the calls of one role, which is drawn, wait `delay_s` in a step."""
    delay_s: float = key(1.0, above=0, read_when=unless("delay", 0))
    """Seconds of a delay."""
    seed: int = key(1, allows="a number")
    """Decides which faults come when, and whom they strike."""

    @property
    def has_faults(self) -> bool:
        """Whether a run is to be tried at all."""
        return max(self.kill_worker, self.delay) > 0
