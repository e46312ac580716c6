"""The section `chaos`: faults on purpose, which `trainer.chaos` brings about."""

from __future__ import annotations

from dataclasses import dataclass

from verl_like.config_key import When, key

HAS_FAULTS = When(
    "one of `chaos.kill_worker`, `chaos.drop_bucket`, `chaos.delay` is above 0",
    lambda _, run: run.chaos.has_faults,
    "chaos.kill_worker, chaos.drop_bucket and chaos.delay are 0, so there are no faults",
)
DELAYS = When(
    "`chaos.delay` is above 0", lambda _, run: run.chaos.delay > 0, "chaos.delay is 0: no delays"
)


@dataclass(kw_only=True)
class ChaosConfig:
    """How often which fault comes: chances per step."""

    kill_worker: float = key(0.0, at_least=0, at_most=1)
    """Chance that a step begins with the death of a worker process, of a random pool."""
    drop_bucket: float = key(0.0, at_least=0, at_most=1)
    """Chance that the next weight sync after a step's begin loses a bucket on its way."""
    delay: float = key(0.0, at_least=0, at_most=1)
    """Chance that the calls of one role, which is drawn, wait `delay_s` in a step."""
    delay_s: float = key(1.0, above=0, read_when=DELAYS)
    """Seconds of a delay."""
    seed: int = key(1, allows="a number")
    """Decides which faults come when, and whom they strike."""

    @property
    def has_faults(self) -> bool:
        """Whether a run is to be tried at all."""
        return max(self.kill_worker, self.drop_bucket, self.delay) > 0
