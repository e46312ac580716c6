"""Pacing: how far makers may run ahead, so that no sample grows too old to be trained on.

Samples are trained on in steps of one batch, and every `update_steps` batches there is a version of
the weights. What is begun with version v is trained on at version v + `max_staleness` at the
latest, if all that is open then fits into the batches up to there. So a maker waits before it
begins what would not fit: nothing is thrown away for its age.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BufferSettings:
    """What the configuration says of the experience buffer."""

    limit: int
    evicts: bool
    """Whether what comes into a full buffer pushes the oldest out, instead of waiting."""
    seed: int
    window: int | None = None
    stall_s: float = 120.0


@dataclass(frozen=True)
class Demand:
    """What the trainer waits for, if it does, and what it will ask for later."""

    num_samples: int = 0
    attempt: int = 0
    rest_of_version: int = 0
    """Fresh samples after these, before the next version of the weights."""
    rest_of_run: int | None = None
    """Fresh samples after these; None: nobody can say."""


@dataclass(frozen=True)
class Pacing:
    """The bound of a run, in samples."""

    max_staleness: int
    """Versions between the draw of a sample's oldest token and the update that trains on it."""
    samples_per_version: int
    """Fresh samples that are trained on between two versions of the weights."""

    def bound(self, demand: Demand, lag: int) -> int:
        """Samples that may be open at once, for a maker whose weights are `lag` versions old."""
        ahead = (self.max_staleness - lag) * self.samples_per_version
        bound = max(demand.num_samples + demand.rest_of_version + ahead, 0)
        if demand.rest_of_run is None:
            return bound
        return min(bound, demand.num_samples + demand.rest_of_run)
