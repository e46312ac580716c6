"""The seconds of generation and training, read from a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.trainer.tools.report.report_runs import make_run
from trainer.cli.check import measured_sides
from verl_like.errors import ConfigError


def test_generation_and_training_of_a_run_are_compared(tmp_path: Path) -> None:
    steps, ratio, speed, _ = measured_sides(str(make_run(tmp_path / "run", 3)), 2)
    assert steps.startswith("Measured in steps 2 to 3 of ")  # the first step warms up
    assert "generation 0.3 s, weight sync 0.1 s, scores and updates 0.6 s" in steps
    assert ratio == "Generation takes 0.5 times as long as scores and updates."
    assert "a step takes about 0.6 s" in speed
    assert speed.endswith("synchronously, it takes 1 s.")


def test_generation_and_training_on_shared_devices_are_noted(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", 2)
    assert "share devices" in measured_sides(str(folder), 1)[-1]
    trace = (folder / "timeline.json").read_text()
    (folder / "timeline.json").write_text(trace.replace("generate_sequences", "generate"))
    assert len(measured_sides(str(folder), 1)) == 3


@pytest.mark.parametrize(
    "line", [{"timing_s/step": 1.0}, {"timing_s/sample": 1.0, "async/queue_depth": 4.0}]
)
def test_a_run_without_seconds_of_generation_is_rejected(
    tmp_path: Path, line: dict[str, float]
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, **line}))
    with pytest.raises(ConfigError, match="Pass the folder of a PPO run"):
        measured_sides(str(tmp_path), 1)
