"""Ray's object store on the driver's node: its bytes in every step, and a warning before it spills.

Batches that a step sends to workers are in this store. From four fifths on, Ray writes the oldest
objects to the disk and reads them again, which is slow.
"""

from __future__ import annotations

import logging
from typing import Any

from verl_like.backends.ray.cluster import store_usage

WARNS_AT = 0.6
"""Fraction of the store from which a run is warned, once; Ray spills from 0.8 on."""
USED, SPILLED = "perf/object_store_mib", "perf/object_store_spilled_mib"
MIB = 2**20
logger = logging.getLogger(__name__)


class ObjectStore:
    """Records the largest use after any stage of a step, and the bytes that the step spilled."""

    def __init__(self) -> None:
        self._peak = self._spilled_before = 0
        self._has_warned = False

    def on_train_begin(self, trainer: Any) -> None:
        """Spilled bytes of other runs on the cluster do not count."""
        *_, self._spilled_before = store_usage()

    def on_stage_end(self, trainer: Any, stage: str, result: Any) -> None:
        """Note the use of the store, and warn if little is left."""
        used, room, _ = store_usage()
        self._peak = max(self._peak, used)
        if used > WARNS_AT * room and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Ray's object store has %.0f of %.0f MiB in use after the stage %s of step %d. "
                "From 80 %% on, it moves objects to the disk, which is slow. Raise "
                "ray.object_store_gib (for a cluster that runs already: ray start "
                "--object-store-memory=BYTES), or make the batch smaller.",
                *(used / MIB, room / MIB, stage, trainer.global_step),
            )

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Add the step's metrics."""
        used, _, spilled = store_usage()
        metrics[USED] = max(self._peak, used) / MIB
        metrics[SPILLED] = (spilled - self._spilled_before) / MIB
        self._peak, self._spilled_before = 0, spilled
