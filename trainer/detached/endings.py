"""Why a wait for samples ends without any, raised by `ExperienceBuffer.take`, or lasts."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from verl_like.errors import VerlLikeError

logger = logging.getLogger(__name__)


class StalledError(VerlLikeError, RuntimeError):
    """Makers and trainer wait for each other; the message says who waits for what."""

    @classmethod
    def of_trainer(cls, num_samples: int, num_queued: int, who_waits: str | None) -> StalledError:
        """The trainer waits for so many; `who_waits` is None where no maker is left."""
        where = f"the trainer waits for {num_samples} samples, {num_queued} are queued, "
        if who_waits is None:
            return cls(where + "and there is no maker left.")
        return cls(
            f"{where}nothing is being made, and every maker waits: {who_waits}. A larger "
            "detached.limit or detached.max_staleness, or another sampler, would let them go on."
        )


class StallWarning:
    """Says who waits for whom, each time that a wait has lasted so many seconds more."""

    def __init__(self, every_s: float, who_waits: Callable[[], Sequence[str]]) -> None:
        """The wait begins."""
        self._every_s, self._who_waits = every_s, who_waits
        self._began = self._warned = time.monotonic()

    def look(self) -> None:
        """Warn if it is time."""
        now = time.monotonic()
        if now - self._warned > self._every_s:
            logger.warning(
                "no batch for %.0f s: %s", now - self._began, "; ".join(self._who_waits())
            )
            self._warned = now


class EndOfSamples(Exception):
    """No maker has prompts left, and no batch can be filled."""


class ToldToStop(Exception):
    """The run is to stop, while a maker without which it gets no batch waited for a node."""
