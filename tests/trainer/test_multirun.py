"""`--multirun` goes on after a job that fails, and ends with the runs side by side."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.report.report_runs import make_run
from trainer import main_ppo
from trainer.multirun import Sweep


def jobs(
    monkeypatch: pytest.MonkeyPatch, folder: Path, sweep: str, run: Any
) -> pytest.ExceptionInfo[SystemExit] | None:
    """`main` with `run` in the place of a run; how the process ended."""
    monkeypatch.setattr("trainer.launch.run", run)
    monkeypatch.setattr(main_ppo, "_sweep", Sweep())
    needed = [
        "data.train_files=x",
        "actor_rollout_ref.model.path=y",
        f"trainer.default_local_dir={folder}",
    ]
    monkeypatch.setattr(sys, "argv", ["verl-like", "--multirun", *needed, sweep])
    monkeypatch.chdir(folder)
    try:
        main_ppo.main()
    except SystemExit:
        return pytest.ExceptionInfo.from_current()
    return None


def test_a_failing_job_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(config: Any) -> None:
        make_run(Path(config.trainer.default_local_dir), 2)
        if config.trainer.seed == 2:
            raise ValueError("of the user's own")

    ended = jobs(monkeypatch, tmp_path, "trainer.seed=1,2,3", run)
    assert ended is not None
    assert ended.value.code == "error: 1 of 3 jobs failed"
    said = capsys.readouterr()
    assert "ValueError: of the user's own" in said.err
    assert "HYDRA_FULL_ERROR" not in said.err
    assert "\ntrainer.seed=2  its traceback is above\n" in said.out
    assert "What came out" in said.out
    assert (tmp_path / "comparison.html").is_file()


def test_a_job_that_cannot_be_right_is_left_out(
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
