"""The seconds of phases, read from a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.report.report_runs import make_run
from trainer.planner.simulate import measured_phases
from verl_like.errors import ConfigError


def write_metrics(folder: Path, *lines: dict[str, float]) -> Path:
    rows = [{"step": step, **line} for step, line in enumerate(lines, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_synchronous_run_has_the_seconds_of_its_stages(tmp_path: Path) -> None:
    phases, notes = measured_phases(make_run(tmp_path / "run", 3))
    assert phases.generate == [0.3, 0.3]  # the first step warms up
    assert phases.score == [0.15, 0.15]
    assert phases.sync == [0.1, 0.1]
    assert phases.update == pytest.approx([1.0 - 0.3 - 0.15 - 0.1] * 2)
    assert notes[0].startswith("measured in steps 2 to 3 of ")


def test_generators_and_trainers_on_shared_devices_are_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2)
    assert "share devices" in measured_phases(folder)[1][1]

    trace = (folder / "timeline.json").read_text()
    (folder / "timeline.json").write_text(trace.replace("generate_sequences", "generate"))
    assert len(measured_phases(folder)[1]) == 1


def test_an_async_run_has_the_seconds_of_its_generators(tmp_path: Path) -> None:
    line = {
        "timing_s/step": 2.0, "timing_s/gen": 0.5, "timing_s/score": 0.3, "timing_s/update": 1.0,
        "timing_s/update_weights": 0.1,
        "async/generator_0/busy_s": 1.5, "async/generator_0/syncing_s": 0.2,
        "async/generator_1/busy_s": 1.0, "async/generator_1/syncing_s": 0.3,
    }  # fmt: skip
    phases, _ = measured_phases(write_metrics(tmp_path, line))
    assert (phases.generate, phases.score, phases.sync) == ([2.5], [0.3], [0.3])
    assert phases.update == pytest.approx([2.0 - 0.5 - 0.3])  # publishing is the trainer's work


def test_a_run_that_generates_nothing_is_rejected(tmp_path: Path) -> None:
    folder = write_metrics(tmp_path, {"timing_s/step": 1.0})
    with pytest.raises(ConfigError, match=r"has no timing_s/gen.*--gen-s, --score-s"):
        measured_phases(folder)
