"""The trace has a lane per pool, role and rank, and every call from its start to its end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.timeline import write_timeline


def record(pool: str, role: str, rank: int, start: float, end: float) -> dict[str, Any]:
    return {
        "pool": pool, "role": role, "rank": rank, "method": f"update_{role}",
        "pid": 100 + rank, "start": start, "end": end, "cpu_s": 0.25,
    }  # fmt: skip


def test_calls_keep_their_times_workers_and_lanes(tmp_path: Path) -> None:
    records = [
        record("a", "actor", 0, 10.0, 12.0),
        record("a", "actor", 1, 10.5, 12.0),
        record("b", "critic", 0, 9.0, 11.0),
    ]
    write_timeline(tmp_path / "timeline.json", records)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    assert [(c["name"], c["ts"], c["dur"]) for c in calls] == [
        ("update_critic", 0.0, 2e6),
        ("update_actor", 1e6, 2e6),
        ("update_actor", 1.5e6, 1.5e6),
    ]
    assert calls[2]["args"] == {"pid": 101, "rank": 1, "cpu_s": 0.25}
    assert len({(c["pid"], c["tid"]) for c in calls}) == 3
    assert calls[1]["pid"] == calls[2]["pid"] != calls[0]["pid"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {"a", "b", "actor-0", "actor-1", "critic-0"}


def test_no_calls_give_an_empty_trace(tmp_path: Path) -> None:
    write_timeline(tmp_path / "timeline.json", [])
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] == []
