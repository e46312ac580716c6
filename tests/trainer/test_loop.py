"""The loop, checkpoints, report, tracking, timeline and placement work for any recipe.

The tests use a regression of less than 60 lines, including its YAML, on a toy worker, without an
algorithm, a tokenizer or prompts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.integration.runs import calls, lines, numbers
from tests.trainer.recipes.regression import REGRESSION, RegressionConfig, RegressionTrainer
from trainer import load_config, run
from trainer.config.schema import Recipe
from trainer.recipe_command import exit_on_error
from trainer.run_folder.signals import SIGNALS, RunInterrupted
from verl_like.config_key import replace_keys
from verl_like.errors import CheckpointError
from verl_like.files import fingerprint


def config(
    folder: Path, placement: str = "colocate", recipe: Recipe[Any] = REGRESSION, **trainer: Any
) -> RegressionConfig:
    """Six steps on one device per pool, with a checkpoint after every second one."""
    settings: dict[str, Any] = {"total_training_steps": 6, "save_freq": 2, "logger": []}
    settings |= {"backend": "local", "default_local_dir": folder, **trainer}
    settings["n_gpus_per_node"] = 2 if placement == "split" else 1
    overrides = [f"trainer.{name}={value}".replace("'", "") for name, value in settings.items()]
    return load_config([f"placement={placement}", *overrides], recipe)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of an uninterrupted run on one pool."""
    folder = tmp_path_factory.mktemp("regression")
    run(config(folder))
    return folder


def test_the_run_folder_has_every_file_and_every_call(whole: Path) -> None:
    for name in ("config.yaml", "placement.txt", "metrics.jsonl", "timeline.json", "report.html"):
        assert (whole / name).is_file(), name
    assert "lr: 0.1" in (whole / "config.yaml").read_text(encoding="utf-8")
    assert "teacher" in (whole / "placement.txt").read_text(encoding="utf-8")
    for method in ("label", "update"):
        assert [call["args"]["step"] for call in calls(whole, method)] == [1, 2, 3, 4, 5, 6]


def test_a_split_placement_gives_the_same_numbers(whole: Path, tmp_path: Path) -> None:
    run(config(tmp_path, "split"))
    assert numbers(tmp_path) == numbers(whole)
    assert "student_pool" in (tmp_path / "placement.txt").read_text(encoding="utf-8")


def rewrite_driver_state(checkpoint: Path, older: dict[str, Any]) -> None:
    """Add keys that an older version wrote to the driver's state."""
    path, marker = checkpoint / "trainer.json", checkpoint / "commit.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | older), encoding="utf-8")
    facts = json.loads(marker.read_text())
    facts["files"][path.name] = fingerprint(path)
    marker.write_text(json.dumps(facts), encoding="utf-8")


class Interrupted(RegressionTrainer):
    """Fails in its fifth step."""

    def step(self) -> dict[str, float]:
        if self.global_step == 5:
            raise RuntimeError("interrupted")
        return super().step()


def test_an_interrupted_run_resumes_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="interrupted"):
        run(config(tmp_path), Interrupted)
    assert len(lines(tmp_path)) == 4
    older = {"alarms": {"first": {"entropy": 1.5}, "next": {"drift": [11, 20]}}}
    rewrite_driver_state(tmp_path / "global_step_4", older)
    assert "interrupted" in (tmp_path / "report.html").read_text(encoding="utf-8")

    run(config(tmp_path))
    assert numbers(tmp_path) == numbers(whole)
    assert len(calls(tmp_path, "load_checkpoint")) == 2
    assert json.loads((tmp_path / "global_step_6" / "trainer.json").read_text()) == {
        "global_step": 6,
        "is_last_step": True,
    }


def test_a_second_start_of_a_finished_run_starts_no_worker(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(whole, tmp_path / "run")

    def start(*_: object) -> None:
        raise AssertionError("a worker process was started")

    monkeypatch.setattr("trainer.launch.WorkerGroups", start)
    result = run(config(folder))
    shown = capsys.readouterr().out
    assert f"{folder} holds this run, which ended with step 6: nothing is left to do." in shown
    assert f"report: {folder}/report.html" in shown
    assert result.metrics == lines(whole)
    with pytest.raises(AssertionError, match="was started"):
        run(config(folder, total_training_steps=7))


class Signalled(RegressionTrainer):
    """Gets signals in its third step."""

    signals: ClassVar[list[signal.Signals]] = []

    def step(self) -> dict[str, float]:
        if self.global_step == 3:
            for number in self.signals:
                os.kill(os.getpid(), number)
        return super().step()


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 143)],
)
def test_a_signal_ends_the_run_after_its_step_with_a_checkpoint(
    whole: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    monkeypatch.setattr(Signalled, "signals", [number])
    if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the tests run under nohup, where a run ignores it")
    handlers = [signal.getsignal(name) for name in SIGNALS]
    with pytest.raises(SystemExit) as ended, exit_on_error(tmp_path):
        run(config(tmp_path, save_freq=-1), Signalled)
    assert ended.value.code == code
    assert [signal.getsignal(name) for name in SIGNALS] == handlers
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert f"Stopped by {number.name} after step 3 of 6" in report
    last_line = capfd.readouterr().err.splitlines()[-1]
    assert f"Stopped by {number.name} after step 3 of 6, saved in {tmp_path}" in last_line
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]

    run(config(tmp_path))
    assert numbers(tmp_path) == numbers(whole)


def test_a_second_signal_ends_the_run_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signalled, "signals", [signal.SIGTERM, signal.SIGUSR1])
    with pytest.raises(RunInterrupted, match="Stopped by SIGUSR1 at once") as stopped:
        run(config(tmp_path), Signalled)
    assert stopped.value.exit_code == 143
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert not (tmp_path / "global_step_3").exists()
    assert (tmp_path / "report.html").is_file()


def test_a_signal_ends_a_run_without_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Signalled, "signals", [signal.SIGTERM])
    with pytest.raises(RunInterrupted, match="after step 3 of 6, without a checkpoint"):
        run(config(tmp_path, save_freq=-1, save_every_minutes="null"), Signalled)
    assert not list(tmp_path.glob("global_step_*"))


def test_a_folder_of_another_configuration_is_rejected(whole: Path) -> None:
    with pytest.raises(CheckpointError, match=r"lr was 0\.1, is 0\.2"):
        run(replace_keys(config(whole), {"lr": 0.2}))


def test_runs_stop_at_their_goal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(config(tmp_path, stop_at={"student/loss": 0.0}))
    assert len(lines(tmp_path)) == 1
    assert (tmp_path / "global_step_1").is_dir()
    assert "student/loss" in capsys.readouterr().out


class WithHeadline(RegressionTrainer):
    """Has its own headline."""

    @classmethod
    def headline(cls, metrics: Mapping[str, float]) -> list[str]:
        return [f"off by {metrics['student/loss']:.2g}"]


def test_a_headline_of_the_trainer_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(config(tmp_path, total_training_steps=1, logger=["console"]), WithHeadline)
    loss = lines(tmp_path)[0]["student/loss"]
    shown = capsys.readouterr().out
    assert f"step 1/1  off by {loss:.2g}  " in shown
    assert f"  student/loss {loss:.4g}" in shown


class Validated(RegressionTrainer):
    """Validates by a constant."""

    has_validation = True

    def validation_metrics(self) -> dict[str, float]:
        return {"val-core/constant": 1.0}


class SignalledAsItValidates(Validated):
    """Gets a signal in every validation."""

    def validation_metrics(self) -> dict[str, float]:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().validation_metrics()


def test_a_signal_in_a_validation_waits_for_its_step(whole: Path, tmp_path: Path) -> None:
    settings = {"save_freq": -1, "test_freq": 4, "val_before_train": False}
    with pytest.raises(RunInterrupted, match="SIGTERM after step 4 of 6, saved in"):
        run(config(tmp_path, **settings), SignalledAsItValidates)
    assert lines(tmp_path)[-1]["val-core/constant"] == 1.0
    run(config(tmp_path))
    assert numbers(tmp_path)[4:] == numbers(whole)[4:]


def test_a_signal_in_the_first_validation_ends_the_run_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunInterrupted, match="SIGTERM at once"):
        run(config(tmp_path), SignalledAsItValidates)
    assert not list(tmp_path.glob("global_step_*"))


def test_validations_run_when_they_are_due(tmp_path: Path) -> None:
    run(config(tmp_path, test_freq=4), Validated)
    steps = [line["step"] for line in lines(tmp_path) if "val-core/constant" in line]
    assert steps == [0, 4, 6]


@pytest.mark.parametrize(("test_freq", "expected"), [(0, [0, 1]), (1, [0, 1]), (-1, [0])])
def test_a_run_that_reaches_its_goal_validates_its_last_step(
    tmp_path: Path, test_freq: int, expected: list[int]
) -> None:
    run(config(tmp_path, stop_at={"student/loss": 0.0}, test_freq=test_freq), Validated)
    steps = [line["step"] for line in lines(tmp_path) if "val-core/constant" in line]
    assert steps == expected
