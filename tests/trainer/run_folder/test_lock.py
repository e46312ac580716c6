"""Two runs in one folder: the second is rejected, and a stale lock is taken over."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.runs import overrides
from trainer import run
from trainer.ppo.recipe import load_config
from trainer.run_folder.folder import FolderLock
from verl_like.errors import ConfigError


def test_the_second_run_is_rejected_with_host_and_pid_of_the_first(tmp_path: Path) -> None:
    owner = f"process {os.getpid()} on {socket.gethostname()}, a run since"
    with FolderLock(tmp_path):
        with pytest.raises(ConfigError, match=f"is in use by {owner}"), FolderLock(tmp_path):
            pass
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    assert (tmp_path / "run.lock").read_bytes() == b""
    with FolderLock(tmp_path):
        pass


KILLED = """
import os, subprocess, sys
from trainer.run_folder.folder import FolderLock
FolderLock(sys.argv[1]).__enter__()
child = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL, close_fds=False)
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_killed_runs_lock_is_taken_over_although_its_child_lives(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(program, check=False, stdout=subprocess.PIPE, text=True)
    stale = json.loads((tmp_path / "run.lock").read_text())
    try:
        with caplog.at_level(logging.INFO, "trainer"), FolderLock(tmp_path):
            assert f"is a stale lock of process {stale['pid']}" in caplog.text
            assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
    finally:
        os.kill(int(done.stdout), signal.SIGKILL)


@pytest.mark.parametrize(
    "left",
    [
        json.dumps({"host": socket.gethostname(), "pid": os.getppid(), "since": "yesterday"}),
        json.dumps({"host": "another", "pid": 1, "since": "yesterday"}),
        '{"host": "half a li',
        "[]",
    ],
    ids=["reused pid", "another host", "half a line", "no object"],
)
def test_the_file_lock_decides_and_not_the_contents_of_the_file(tmp_path: Path, left: str) -> None:
    (tmp_path / "run.lock").write_text(left)
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / "run.lock").read_text())["pid"] == os.getpid()
        (tmp_path / "run.lock").write_text(left)
        with pytest.raises(ConfigError, match="is in use by"):
            FolderLock(tmp_path).acquire()


def test_a_folder_created_later_can_be_locked(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "new") as lock:
        assert not (tmp_path / "new").exists()
        (tmp_path / "new").mkdir()
        lock.acquire()
        lock.acquire()
        with pytest.raises(ConfigError, match="is in use"):
            FolderLock(tmp_path / "new").acquire()


def test_a_file_system_without_locks_gets_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    with FolderLock(tmp_path):
        assert "Do not start a second run in this folder" in caplog.text


def test_a_rejected_run_changes_no_file_of_the_first(tmp_path: Path) -> None:
    config = load_config(overrides(tmp_path, tmp_path / "run", "trainer.backend=local"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("of the first run")
    with FolderLock(tmp_path / "run"), pytest.raises(ConfigError, match="is in use by process"):
        run(config)
    assert (tmp_path / "run" / "config.yaml").read_text() == "of the first run"
