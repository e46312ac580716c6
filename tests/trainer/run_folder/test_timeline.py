"""The timeline of calls, and the overlap ratios."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from trainer.run_folder.timeline import Timeline, call_timings


def record(
    pool: str, role: str, rank: int, start: float, end: float, **more: Any
) -> dict[str, Any]:
    return {
        "pool": pool, "role": role, "rank": rank, "method": f"update_{role}",
        "pid": 100 + rank, "start": start, "end": end, "cpu_s": 0.25, **more,
    }  # fmt: skip


def events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def calls(path: Path) -> list[dict[str, Any]]:
    return [event for event in events(path) if event["ph"] == "X"]


def test_calls_keep_their_times_workers_and_lanes(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    records = [
        record("a", "actor", 0, 10.0, 12.0),
        record("a", "actor", 1, 10.5, 12.0, step=7),
        record("b", "critic", 0, 9.0, 11.0),
    ]
    Timeline(path).add(records)
    drawn = calls(path)
    assert [(c["name"], c["ts"], c["dur"]) for c in drawn] == [
        ("update_critic", 9e6, 2e6),
        ("update_actor", 10e6, 2e6),
        ("update_actor", 10.5e6, 1.5e6),
    ]
    assert drawn[2]["args"] == {"cpu_s": 0.25, "step": 7}
    assert len({(c["pid"], c["tid"]) for c in drawn}) == 3
    assert drawn[1]["pid"] == drawn[2]["pid"] != drawn[0]["pid"]

    described = [e for e in events(path) if e["ph"] == "M"]
    lanes = {e["args"]["name"]: e["args"] for e in described}
    assert lanes.keys() == {"a", "b", "actor-0", "actor-1", "critic-0"}
    assert lanes["actor-1"] == {"name": "actor-1", "role": "actor", "rank": 1, "pid": 101}


def test_the_file_is_valid_json_after_every_step(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    assert events(path) == []
    for step in range(3):
        timeline.add([record("a", "actor", 0, 10.0 + step, 11.0 + step)])
        timeline.add([])
        assert len(calls(path)) == step + 1


def test_a_resumed_run_continues_its_lanes(tmp_path: Path) -> None:
    path, whole = tmp_path / "timeline.json", tmp_path / "whole.json"
    first = [record("a", "actor", 0, 10.0, 11.0)]
    second = [record("b", "ref", 0, 12.0, 13.0), record("a", "actor", 0, 12.0, 13.0)]
    Timeline(path).add(first)
    Timeline(path, resume=True).add(second)
    timeline = Timeline(whole)
    timeline.add(first)
    timeline.add(second)
    assert path.read_text() == whole.read_text()
    Timeline(path).add(second)
    assert len(calls(path)) == 2


def test_a_lane_is_named_again_if_its_process_changes(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    timeline = Timeline(path)
    for pid in (100, 100, 200):
        timeline.add([{**record("a", "actor", 0, 10.0, 11.0), "pid": pid}])
    Timeline(path, resume=True).add([{**record("a", "actor", 0, 12.0, 13.0), "pid": 200}])
    named = [e for e in events(path) if e["name"] == "thread_name"]
    assert [(e["tid"], e["args"]["pid"]) for e in named] == [(1, 100), (1, 200)]


def test_a_long_timeline_is_resumed_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    Timeline(path).add([record("a", "actor", 0, step, step + 1.0) for step in range(5000)])
    tracemalloc.start()
    resumed = Timeline(path, resume=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 200_000 < path.stat().st_size
    resumed.add([record("b", "actor", 0, 1.0, 2.0)])
    assert len(calls(path)) == 5001


def test_the_overlap_ratio_is_busy_time_over_wall_time() -> None:
    records = [
        record("a", "actor", 0, 0.0, 4.0, stage="update"),
        record("a", "actor", 1, 1.0, 4.0, stage="update"),  # a second rank of a role adds nothing
        record("b", "critic", 0, 0.0, 2.0, stage="update"),
        record("a", "ref", 0, 10.0, 11.0, stage="score"),
        record("a", "actor", 0, 11.0, 12.0, stage="score"),
        record("a", "rollout", 0, 20.0, 30.0, stage="sample"),
    ]
    timings = call_timings(records, {"update": 4.1}, concurrent=("score", "update"))
    assert timings["timing_s/update"] == 4.1
    assert timings["perf/overlap_ratio_update"] == pytest.approx(6 / 4)
    assert timings["perf/overlap_ratio_score"] == pytest.approx(2 / 2)
    assert timings["perf/overlap_ratio"] == pytest.approx(8 / 6)


def test_time_between_two_calls_of_a_method_is_not_counted() -> None:
    records = [
        record("a", "actor", 0, 5.0, 7.0),
        record("a", "actor", 1, 5.5, 7.5),  # overlaps the first
        record("a", "actor", 0, 0.0, 1.0),
        record("a", "actor", 1, 0.25, 0.5),  # within it
    ]
    assert call_timings(records, {}) == {"timing_s/update_actor": 1.0 + 2.5}
