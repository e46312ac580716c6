"""The calls in the timeline: those of training steps, on an axis without pauses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import draw_figures
from tests.trainer.tools.report.report_runs import CALLS, make_run
from trainer.run_folder.timeline import Timeline
from trainer.tools.report.page import write_report
from trainer.tools.report.read import (
    TracedCall,
    last_steps,
    pools_at_work,
    read_run,
    read_timeline,
    without_pauses,
)


def calls_of(step: int, start: float, stage: str = "") -> list[TracedCall]:
    """Return one second of two calls."""
    return [
        TracedCall("a", "actor-0", "actor", "compute_log_prob", start, start + 0.4, step, stage),
        TracedCall("a", "actor-0", "actor", "update_actor", start + 0.5, start + 1.0, step, stage),
    ]


def test_validation_and_checkpoint_calls_are_not_in_the_last_steps() -> None:
    started = calls_of(0, 0.0, "init")
    trained = [call for step in (1, 2, 3) for call in calls_of(step, 10.0 + step, "update")]
    ended = [*calls_of(3, 14.0, "testing"), *calls_of(3, 30.0, "save_checkpoint")]
    assert last_steps([*started, *trained, *ended], 3) == trained
    assert last_steps([*started, *trained, *ended], 1) == trained[-2:]


def test_pauses_are_cut_from_the_time_axis() -> None:
    calls = [*calls_of(1, 0.0), *calls_of(2, 31.0), *calls_of(3, 5000.0)]
    shown, cuts = without_pauses(calls)
    assert [call.start for call in shown] == pytest.approx([0.0, 0.5, 1.2, 1.7, 2.4, 2.9])
    assert [call.end - call.start for call in shown] == pytest.approx([0.4, 0.5] * 3)
    assert cuts == pytest.approx([1.1, 2.3])


def test_a_timeline_of_an_older_version_is_read(tmp_path: Path) -> None:
    named = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "train"}}
    lane = {**named, "tid": 2, "name": "thread_name", "args": {"name": "actor-1"}}
    call = {"ph": "X", "name": "update_actor", "cat": "actor", "pid": 1, "tid": 2}
    call |= {"ts": 500000, "dur": 250000, "args": {"pid": 9, "rank": 1, "step": 3}}
    trace = {"traceEvents": [named, lane, call], "otherData": {"stages": ["update"]}}
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(trace))
    read = TracedCall("train", "actor-1", "actor", "update_actor", 0.5, 0.75, 3)
    assert read_timeline(path, []) == ([read], ["update"])


def test_the_page_marks_pauses_and_counts_trained_steps(
    tmp_path: Path, drawings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draw_figures([drawing for drawing in drawings if drawing[1] == "timeline"], monkeypatch)
    folder = make_run(tmp_path / "run", 3, samples=1)
    timeline = Timeline(folder / "timeline.json", resume=True)
    for step, stage, delay in ((3, "testing", 10.0), (4, "update", 500.0)):
        timeline.add(
            {
                "pool": pool, "role": role, "rank": 0, "method": method, "step": step,
                "stage": stage, "start": delay + start, "end": delay + end,
            }
            for pool, role, method, start, end in CALLS
        )  # fmt: skip
    metrics = folder / "metrics.jsonl"
    lines = [{"step": 0, "val-core/x": 0.5}, *map(json.loads, metrics.read_text().splitlines())]
    lines.append({**lines[-1], "step": 4})
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))

    page = write_report(folder).read_text()
    assert "Dotted lines mark a pause, such as a validation, a checkpoint or a restart" in page
    assert '<span class="soft">steps</span><b>4</b>' in page
    assert {call.step for call in last_steps(read_run(folder).calls, 3)} == {2, 3, 4}


def test_a_run_without_its_first_steps_shows_the_range_of_steps(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 1, samples=1)
    lines = [{"step": step, "timing_s/step": 1.0} for step in (11, 12)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert '<span class="soft">steps</span><b>2 (11 to 12)</b>' in write_report(folder).read_text()


def test_pools_at_work_change_only_when_a_pool_starts_or_ends() -> None:
    def of(pool: str, start: float, end: float) -> list[TracedCall]:
        lanes = [f"{pool}-{rank}" for rank in range(8)]
        ends = [(start + 0.01 * rank, end - 0.01 * rank) for rank in range(8)]
        return [
            TracedCall(pool, lane, pool, "m", *at, 1) for lane, at in zip(lanes, ends, strict=True)
        ]

    stretches = pools_at_work([*of("a", 0.0, 2.0), *of("b", 1.0, 3.0)])
    assert stretches == [(0.0, 1.0, 1), (1.0, 2.0, 2), (2.0, 3.0, 1)]
