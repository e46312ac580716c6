"""The system's facts about a process."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.waiting import wait_until
from verl_like.process.machine import children, process_state, resident_bytes, usable_cores


def test_process_state_follows_a_process_to_its_end(tmp_path: Path) -> None:
    program = tmp_path / "odd) R (name"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as process:
        await_state(process.pid, "S")
        process.send_signal(signal.SIGSTOP)
        await_state(process.pid, "T")
        process.kill()
        await_state(process.pid, "Z")
    assert process_state(process.pid) is None


def test_children_lists_running_children() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        assert process.pid in children(os.getpid())
        process.kill()
    assert process.pid not in children(os.getpid())
    assert list(children(process.pid)) == []


def await_state(pid: int, state: str) -> None:
    wait_until(lambda: process_state(pid) == state)


def test_resident_bytes_grow_with_allocated_memory() -> None:
    size = 64 * 2**20
    before = resident_bytes(os.getpid())
    with mmap.mmap(-1, size) as held:  # pages of its own, whatever the heap has left
        held.write(b"x" * size)
        after = resident_bytes(os.getpid())
    if before is None or after is None:
        pytest.skip("this system does not say")
    assert after - before > 0.8 * size


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1)]
)
def test_a_quota_of_the_container_limits_the_cores(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(tmp_path) == cores
