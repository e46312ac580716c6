"""`--multirun` continues after a job that fails, and ends with a comparison of the runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.report.report_runs import make_run
from trainer.ppo.recipe import PPO
from trainer.recipe_command import run_command


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
    assert "Results" in captured.out
    assert (tmp_path / "comparison.html").is_file()


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
