"""`syncs.jsonl` has a line for every delivery of weights."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import lines
from trainer.async_training.weights import SyncLog


def figures(version: int) -> dict[str, float]:
    """Return the report of a delivery of 5 MiB."""
    return {
        "timing_s/weight_sync": 0.25,
        "perf/weight_sync_hash_s": 0.125,
        "perf/weight_sync_mb": 5.0,
        "training/weight_version": float(version),
    }


def test_a_line_describes_a_delivery(tmp_path: Path) -> None:
    SyncLog(tmp_path).add(1, "rollout_1", figures(3))
    (line,) = lines(tmp_path, "syncs.jsonl")
    assert line.pop("time") > 1.7e9
    assert line.pop("driver_rss_bytes") > 2**24
    assert line == {
        "version": 3,
        "generator": 1,
        "role": "rollout_1",
        "seconds": 0.25,
        "hash_s": 0.125,
        "bytes": 5 * 2**20,
    }
