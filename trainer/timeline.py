"""`timeline.json`: what every worker did when, for Perfetto or chrome://tracing. `trainer.ppo` writes it at the end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def trace_events(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Chrome trace events: a lane group per pool, in it a lane per role and rank, in it the calls.

    A record has role, method, rank, pid (of the worker), start, end (seconds of one clock), cpu_s and pool.
    """
    ordered = sorted(records, key=lambda r: r["start"])
    origin = ordered[0]["start"] if ordered else 0.0
    pools = {pool: number for number, pool in enumerate(sorted({r["pool"] for r in ordered}), 1)}
    lanes = sorted({(r["pool"], r["role"], r["rank"]) for r in ordered})
    numbers = {lane: number for number, lane in enumerate(lanes, 1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": pool}} for pool, number in pools.items()
    ]
    for (pool, role, rank), number in numbers.items():
        name = {"name": f"{role}-{rank}"}
        events.append({"ph": "M", "name": "thread_name", "pid": pools[pool], "tid": number, "args": name})
    for record in ordered:
        events.append(
            {
                "ph": "X",
                "name": record["method"],
                "cat": record["role"],
                "pid": pools[record["pool"]],
                "tid": numbers[record["pool"], record["role"], record["rank"]],
                "ts": (record["start"] - origin) * 1e6,
                "dur": (record["end"] - record["start"]) * 1e6,
                "args": {"pid": record["pid"], "rank": record["rank"], "cpu_s": record["cpu_s"]},
            }
        )
    return events


STAGE_OF = {
    "compute_log_prob": "old_log_prob",
    "compute_ref_log_prob": "ref",
    "compute_values": "values",
    "generate_sequences": "generate_sequences",
}
"""verl's name for the time of a worker's method, where it has another one."""


def call_timings(records: Iterable[Mapping[str, Any]], stages: Mapping[str, float]) -> dict[str, float]:
    """`timing_s/...` of a step's stages and calls (first start to last end), and how much of the updates overlapped.

    `perf/overlap_ratio` is the time in which roles were busy with their updates, added up, over the time it took: 1
    when they took turns, 2 when two of them ran side by side throughout.
    """
    spans: dict[str, tuple[float, float]] = {}
    for record in records:
        start, end = spans.get(record["method"], (record["start"], record["end"]))
        spans[record["method"]] = min(start, record["start"]), max(end, record["end"])
    timings = {f"timing_s/{stage}": seconds for stage, seconds in stages.items()}
    timings |= {f"timing_s/{STAGE_OF.get(method, method)}": end - start for method, (start, end) in spans.items()}
    updates = [span for method, span in spans.items() if method.startswith("update_") and method != "update_weights"]
    if updates:
        wall = max(end for _, end in updates) - min(start for start, _ in updates)
        timings["perf/overlap_ratio"] = sum(end - start for start, end in updates) / wall
    return timings


def write_timeline(path: str | Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the trace of `records` to `path`, whole or not at all."""
    path = Path(path)
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps({"traceEvents": trace_events(records), "displayTimeUnit": "ms"}), encoding="utf-8")
    partial.replace(path)
