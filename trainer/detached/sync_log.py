"""`syncs.jsonl`: a line for every delivery of weights to a maker, for `detached.debug`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from verl_like.process.machine import resident_bytes

SYNCS_FILE = "syncs.jsonl"
MIB = 2**20


class SyncLog:
    """Bytes, seconds and the driver's memory of each delivery; makers' threads call it."""

    def __init__(self, folder: str | Path) -> None:
        """A run that is gone on with adds to its file."""
        self._path = Path(folder) / SYNCS_FILE
        self._lock = threading.Lock()

    def add(self, maker: int, role: str, figures: Mapping[str, float]) -> None:
        """Write what `deliver_weights` has said of a delivery to this role of the maker's."""
        line = {
            "time": time.time(),
            "version": round(figures["training/weight_version"]),
            "maker": maker,
            "role": role,
            "seconds": figures["timing_s/weight_sync"],
            "hash_s": figures["perf/weight_sync_hash_s"],
            "bytes": round(figures["perf/weight_sync_mb"] * MIB),
            "driver_rss_bytes": resident_bytes(os.getpid()),
        }
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
