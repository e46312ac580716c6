"""The system's facts about a process."""

from __future__ import annotations

import mmap
import os
import re
import resource
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.waiting import wait_until
from verl_like.process import family, machine
from verl_like.process.family import children, descendants
from verl_like.process.machine import (
    MAX_OPEN_FILES,
    allow_many_open_files,
    is_running,
    loopback_interface,
    process_state,
    resident_bytes,
    usable_cores,
)


@pytest.mark.linux
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


@pytest.mark.linux
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


@pytest.mark.parametrize("is_linux", [True, False])
def test_descendants_of_this_process_are_found(
    is_linux: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "IS_LINUX", is_linux and machine.IS_LINUX)
    with subprocess.Popen(["/bin/sh", "-c", "/bin/sleep 60; true"]) as shell:
        wait_until(lambda: len({*descendants(os.getpid())} & {*descendants(shell.pid)}) == 1)
        (sleep,) = descendants(shell.pid)
        assert {shell.pid, sleep} <= {*descendants(os.getpid())}
        shell.kill()
        os.kill(sleep, signal.SIGKILL)


def test_a_process_runs_until_it_is_reaped() -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        assert is_running(process.pid)
        process.kill()
    assert not is_running(process.pid)
    assert is_running(1)
    assert not is_running(0)


@pytest.mark.parametrize(
    ("names", "loopback"), [(["lo", "eth0"], "lo"), (["en0", "lo0", "gif0"], "lo0")]
)
def test_the_loopback_interface_has_the_name_of_the_system(
    names: list[str], loopback: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: [*enumerate(names, 1)])
    assert loopback_interface() == loopback


@pytest.mark.parametrize(
    ("soft", "hard", "then"),
    [
        (256, resource.RLIM_INFINITY, MAX_OPEN_FILES),  # as on macOS
        (1024, 4096, 4096),
        (4096, 4096, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
    ],
)
def test_the_limit_of_open_files_rises_as_far_as_the_system_allows(
    soft: int, hard: int, then: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limit: limits.append(limit))
    allow_many_open_files()
    assert limits == ([] if then is None else [(then, hard)])


LINUX = re.compile(r"/proc\b|/dev/shm|prctl|landlock|seccomp|sched_\w+affinity|/sys/", re.I)
KNOW_LINUX = {
    "trainer/cli/doctor.py",  # which describes the machine
    "verl_like/backends/ray/cluster.py",  # Ray's object store is in /dev/shm
    "workers/cpu/onednn.py",  # the maker of the processor
    "workers/rewards/program.py",  # a warning names Landlock
}


def test_only_the_room_of_processes_knows_linux() -> None:
    files = [
        path.relative_to(ROOT).as_posix()
        for package in ("verl_like", "workers", "trainer")
        for path in (ROOT / package).rglob("*.py")
        if LINUX.search(path.read_text(encoding="utf-8"))
    ]
    outside = {file for file in files if not file.startswith("verl_like/process/")}
    assert outside == KNOW_LINUX
