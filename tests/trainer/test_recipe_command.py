"""A command never ends because of its console; `--multirun` continues after a job that fails."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT
from tests.integration.runs import lines
from tests.trainer.tools.report.report_runs import make_run
from trainer.ppo.recipe import PPO
from trainer.recipe_command import run_command

RUNS = """
import sys
from tests.trainer.recipes.regression import REGRESSION
from trainer.recipe_command import run_command
run_command(REGRESSION, sys.argv[1:])
"""


def test_a_full_console_does_not_end_a_run(forked_python: Path, tmp_path: Path) -> None:
    settings = [f"trainer.default_local_dir={tmp_path}", "trainer.total_training_steps=2"]
    with open("/dev/full", "wb") as console:
        run = [forked_python, "-c", RUNS, "trainer.backend=local", *settings]
        done = subprocess.run(run, cwd=ROOT, stdout=console, stderr=console, check=False)
    assert done.returncode == 0
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def jobs(
    monkeypatch: pytest.MonkeyPatch, folder: Path, sweep: str, run: Any
) -> pytest.ExceptionInfo[SystemExit] | None:
    """Run the recipe's command with `run` as the run; return how the process ended."""
    monkeypatch.setattr("trainer.launch.run", run)
    needed = [
        "data.train_files=x",
        "actor_rollout_ref.model.path=y",
        f"trainer.default_local_dir={folder}",
    ]
    monkeypatch.chdir(folder)
    try:
        run_command(PPO, ["--multirun", *needed, sweep])
    except SystemExit:
        return pytest.ExceptionInfo.from_current()
    return None


def test_a_failing_job_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Any) -> None:
        make_run(Path(config.trainer.default_local_dir), 2)
        if config.trainer.seed == 2:
            raise ValueError("from the user's code")

    ended = jobs(monkeypatch, tmp_path, "trainer.seed=2,3", run)
    assert ended is not None
    assert ended.value.code == "error: 1 of 2 jobs failed"
    captured = capsys.readouterr()
    assert "ValueError: from the user's code" in captured.err
    assert "HYDRA_FULL_ERROR" not in captured.err
    assert "\ntrainer.seed=2  its traceback is above\n" in captured.out
    assert "critic/score/mean" in captured.out


def test_a_job_with_an_invalid_configuration_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    ended = jobs(monkeypatch, tmp_path, "data.train_batch_size=-1,64", seen.append)
    assert ended is not None
    assert [config.data.train_batch_size for config in seen] == [64]
    assert "error: data.train_batch_size=-1" in capsys.readouterr().err


def test_ctrl_c_ends_all_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(config: Any) -> None:
        seen.append(config.trainer.seed)
        raise KeyboardInterrupt

    ended = jobs(monkeypatch, tmp_path, "trainer.seed=1,2", run)
    assert ended is not None
    assert (ended.value.code, seen) == (130, [1])
