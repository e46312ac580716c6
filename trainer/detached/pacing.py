"""Pacing: how far makers may run ahead, so that no sample grows too old to be trained on.

Samples are trained on in steps of one batch, and every `update_steps` batches there is a version of
the weights. What is begun with version v is trained on at version v + `max_staleness` at the
latest, if all that is open then fits into the batches up to there. So a maker waits before it
begins what would not fit: nothing is thrown away for its age.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Pacing:
    """The bound of a run, in samples."""

    max_staleness: int
    """Versions between the draw of a sample's oldest token and the update that trains on it."""
    samples_per_version: int
    """Fresh samples that are trained on between two versions of the weights."""

    def bound(self, demand: int, rest_of_version: int, lag: int) -> int:
        """Samples that may be open at once, for a maker whose weights are `lag` versions old.

        `demand` is what the trainer waits for now, `rest_of_version` what it will ask for after
        that before the next version.
        """
        ahead = (self.max_staleness - lag) * self.samples_per_version
        return max(demand + rest_of_version + ahead, 0)
