"""Why a wait for samples ends without any: raised by `ExperienceBuffer.take`."""

from __future__ import annotations

from verl_like.errors import VerlLikeError


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


class EndOfSamples(Exception):
    """No maker has prompts left, and no batch can be filled."""


class ToldToStop(Exception):
    """The run is to stop, while a maker without which it gets no batch waited for a node."""
