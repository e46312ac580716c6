"""Checkpoints that roles write in the background: when they are committed, and when dropped."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.run_folder.checkpoints import Role, checkpoints
from tests.waiting import LIMIT_S
from trainer.run_folder.checkpoint import Checkpoints
from trainer.run_folder.folder import read_marker, saved_steps
from verl_like.errors import CheckpointError, WorkerDiedError
from workers.training.checkpoints.manifest import NUMBERS, read_manifest, write_manifest


def future_of(work: Any) -> Any:
    """Return the future of a call that runs in a thread."""
    future = ThreadPoolExecutor(1).submit(work)
    return SimpleNamespace(done=future.done, get=lambda timeout=None: future.result(LIMIT_S))


class Writer(Role):
    """Two ranks that write when `gate` opens, or fail."""

    def __init__(self, number: int, error: Exception | None = None) -> None:
        super().__init__(number)
        self.gate, self.error, self.is_dropped = threading.Event(), error, False
        self.write_checkpoint = SimpleNamespace(remote=lambda: future_of(self.write))
        self.hurry_checkpoint = SimpleNamespace(
            remote=lambda is_wanted: future_of(self.hurry if is_wanted else self.drop)
        )

    def start(self, path: str, step: int) -> list[bool]:
        self.folder, self.copy = Path(path), self.number
        self.folder.mkdir()
        write_manifest(self.folder, {**dict.fromkeys(NUMBERS, 0), "contents": [], "files": {}})
        return [True, True]

    def write(self) -> list[dict[str, dict[str, int]]]:
        assert self.gate.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        if self.is_dropped:
            raise CheckpointError("given up")
        (self.folder / "number").write_text(str(self.copy))
        return [{"0": {"bytes": 1, "crc32": 1}}, {"1": {"bytes": 2, "crc32": 2}}]

    def hurry(self) -> None:
        """Do not write any sooner."""

    def drop(self) -> None:
        self.is_dropped = True
        self.gate.set()


def run_with_open_write(folder: Path, writer: Writer, step: int = 2) -> Checkpoints:
    """Return a run after the step whose checkpoint is still being written."""
    run = checkpoints(folder)
    run.write(step, {"actor": writer, "rollout": Role(5)}, {"global_step": step})
    assert run.commit() == []
    return run


def end(run: Checkpoints, error: BaseException) -> None:
    """End the run by this error."""
    with pytest.raises(type(error)), contextlib.closing(run):
        raise error


def test_a_checkpoint_is_committed_when_every_rank_has_written(tmp_path: Path) -> None:
    writer = Writer(7)
    run = run_with_open_write(tmp_path, writer)
    writer.number = 8  # training continues
    assert run.commit() == []
    assert saved_steps(tmp_path) == []
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()
    writer.gate.set()
    run.finish()
    folder = tmp_path / "global_step_2"
    assert run.commit() == [folder]
    assert run.commit() == []
    marked = read_marker(folder)["files"].keys()
    assert {"actor/number", "actor/manifest.json", "rollout/number"} <= marked
    assert sorted(read_manifest(folder / "actor")["files"]) == ["0", "1"]
    assert checkpoints(tmp_path).resume.load({"actor": writer, "rollout": Role(0)}) == {
        "global_step": 2
    }
    assert writer.number == 7


def test_the_next_checkpoint_waits_for_the_previous_one(tmp_path: Path) -> None:
    first, second = Writer(1), Writer(2)
    run = run_with_open_write(tmp_path, first, 2)
    threading.Timer(0.1, first.gate.set).start()
    run.write(4, {"actor": second}, {"global_step": 4})
    assert saved_steps(tmp_path) == [2]
    second.gate.set()
    assert tmp_path / "global_step_2" in run.commit()
    run.finish()
    assert saved_steps(tmp_path) == [2, 4]


def test_waiting_for_a_checkpoint_makes_its_writers_hurry(tmp_path: Path) -> None:
    run = run_with_open_write(tmp_path, writer := Writer(7))
    writer.hurry = writer.gate.set  # type: ignore[method-assign]
    run.finish()
    assert saved_steps(tmp_path) == [2]


def test_a_failed_write_raises_at_the_next_step(tmp_path: Path) -> None:
    cause = "rank 1: shards/1.safetensors: OSError: No space left on device"
    run = run_with_open_write(tmp_path, writer := Writer(7, CheckpointError(cause)))
    writer.gate.set()
    run._wait(LIMIT_S)
    with pytest.raises(CheckpointError, match=f"step 2 was not written: {cause}\\. .* are free"):
        run.commit()
    assert not list(tmp_path.glob("global_step_*"))


def test_a_run_that_ends_by_an_error_commits_its_open_checkpoint(tmp_path: Path) -> None:
    run = run_with_open_write(tmp_path, writer := Writer(7))
    threading.Timer(0.1, writer.gate.set).start()
    end(run, RuntimeError("of a step"))
    assert saved_steps(tmp_path) == [2]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkerDiedError("gone")])
def test_an_interrupted_run_or_a_lost_writer_drops_the_checkpoint(
    tmp_path: Path,
    error: BaseException,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("trainer.run_folder.checkpoint.AFTER_LOSS_S", 0.1)
    run = run_with_open_write(tmp_path, writer := Writer(7))
    end(run, error)
    assert writer.is_dropped
    assert "the checkpoint of step 2 was not written: the run ended" in caplog.text
    assert not list(tmp_path.glob("global_step_*"))


def test_without_async_save_a_checkpoint_is_written_at_once(tmp_path: Path) -> None:
    run = checkpoints(tmp_path, "trainer.async_save=false")
    save = SimpleNamespace(remote=lambda path, step: future_of(Path(path).mkdir))
    run.write(2, {"actor": SimpleNamespace(save_checkpoint=save)}, {"global_step": 2})
    assert run.commit() == [tmp_path / "global_step_2"]
