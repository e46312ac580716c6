"""The process that writes a copy: what becomes of the file when it ends early, and what ends it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.waiting import wait_until
from verl_like.errors import CheckpointError
from verl_like.files import fingerprint
from verl_like.process.machine import children
from workers.training import copy_writer, write_copy
from workers.training.copy_writer import LOWEST_PRIORITY, CopyWriter
from workers.training.host_buffer import HostBuffer

LIMIT_S = 60.0
NUM_BYTES = 100_001
HALTING = """
import mmap, sys, time, zlib

memory, num_bytes, path = sys.argv[1:]
block = mmap.mmap(int(memory), int(num_bytes), prot=mmap.PROT_READ)[:4096]
open(path, "wb").write(block)
print(4096, zlib.crc32(block), flush=True)
open(path + ".told", "w")
time.sleep(60)
"""
"""A program that writes one block, and no more."""


@pytest.fixture(autouse=True)
def _for_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process, however small the file is."""
    monkeypatch.setattr(copy_writer, "LEAST_BYTES", 0)


@pytest.fixture
def buffer() -> HostBuffer:
    held = HostBuffer()
    held.hold(NUM_BYTES, pinned=False)
    held.bytes.random_()
    return held


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the process runs instead of the real one: it halts."""
    path = tmp_path / "program.py"
    path.write_text(HALTING)
    monkeypatch.setattr(write_copy, "__file__", str(path))
    monkeypatch.setattr(copy_writer, "PATIENCE_S", LIMIT_S)  # other tests may want the cores
    return path


def halted(writer: CopyWriter, buffer: HostBuffer, path: Path) -> Future[dict[str, int]]:
    """A write whose process has written one block."""
    pool = ThreadPoolExecutor(1)
    writing = pool.submit(writer.write, path, buffer, NUM_BYTES)
    pool.shutdown(wait=False)
    wait_until(path.with_name(f"{path.name}.told").exists)
    return writing


def own_children() -> set[int]:
    return set(children(os.getpid()))


def test_a_process_writes_the_file_and_is_gone(buffer: HostBuffer, tmp_path: Path) -> None:
    before = own_children()
    found = CopyWriter().write(tmp_path / "file", buffer, NUM_BYTES)
    assert (tmp_path / "file").read_bytes() == buffer.view(NUM_BYTES)
    assert found == fingerprint(tmp_path / "file")
    assert own_children() == before


def test_a_small_file_is_written_without_one(
    buffer: HostBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_writer, "LEAST_BYTES", NUM_BYTES + 1)
    monkeypatch.delattr(subprocess, "Popen")
    found = CopyWriter().write(tmp_path / "file", buffer, NUM_BYTES)
    assert found == fingerprint(tmp_path / "file")


@pytest.mark.usefixtures("program")
def test_when_somebody_waits_the_rest_is_written_at_once(
    buffer: HostBuffer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer, before = CopyWriter(), own_children()
    writing = halted(writer, buffer, tmp_path / "file")
    writer.hurry()
    assert writing.result(LIMIT_S) == fingerprint(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == buffer.view(NUM_BYTES)
    assert (own_children(), caplog.messages) == (before, [])


@pytest.mark.usefixtures("program")
def test_what_a_killed_process_leaves_is_written_and_said(
    buffer: HostBuffer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = own_children()
    writing = halted(CopyWriter(), buffer, tmp_path / "file")
    (pid,) = own_children() - before
    os.kill(pid, signal.SIGKILL)
    assert writing.result(LIMIT_S) == fingerprint(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == buffer.view(NUM_BYTES)
    (said,) = caplog.messages
    assert f"{tmp_path / 'file'}: the process that wrote it ended by" in said
    assert "SIGKILL after 4096 of 100001 bytes" in said


@pytest.mark.usefixtures("program")
def test_the_rest_of_a_process_that_gets_no_time_is_written_at_once(
    buffer: HostBuffer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(copy_writer, "PATIENCE_S", 0.05)
    wants_a_core, is_over = copy_writer._wants_a_core, threading.Event()
    monkeypatch.setattr(
        copy_writer, "_wants_a_core", lambda pid: is_over.is_set() and wants_a_core(pid)
    )
    before = own_children()
    writing = halted(CopyWriter(), buffer, tmp_path / "file")
    (pid,) = own_children() - before
    wait_until(lambda: not wants_a_core(pid))  # it sleeps, as one that waits for the disk
    is_over.set()
    os.kill(pid, signal.SIGSTOP)
    assert writing.result(LIMIT_S) == fingerprint(tmp_path / "file")
    assert re.search(r"got no time from busy cores after \d+ of 100001 bytes", caplog.text)
    assert own_children() == before


@pytest.mark.usefixtures("program")
def test_a_dropped_file_is_written_no_further(buffer: HostBuffer, tmp_path: Path) -> None:
    writer, before = CopyWriter(), own_children()
    writing = halted(writer, buffer, tmp_path / "file")
    writer.drop()
    with pytest.raises(CheckpointError, match="file was given up"):
        writing.result(LIMIT_S)
    assert (tmp_path / "file").stat().st_size == 4096
    assert own_children() == before


def test_where_no_process_can_be_had_this_one_writes_and_says_so(
    buffer: HostBuffer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = CopyWriter().write(tmp_path / "file", buffer, NUM_BYTES)
    assert found == fingerprint(tmp_path / "file")
    assert "is written by the process that trains: " in caplog.text


def test_a_full_disk_is_named(buffer: HostBuffer) -> None:
    with pytest.raises(CheckpointError, match=r"/dev/full: OSError: .*No space left on device"):
        CopyWriter().write(Path("/dev/full"), buffer, NUM_BYTES)


def test_the_process_ends_with_the_worker_that_it_writes_for(tmp_path: Path) -> None:
    held, block = HostBuffer(), write_copy.BLOCK_BYTES
    held.hold(3 * block, pinned=False)
    read_end, write_end = os.pipe()
    os.close(read_end)  # as if the worker were killed
    arguments = [str(held.descriptor), str(3 * block), str(tmp_path / "file")]
    done = subprocess.run(
        [sys.executable, "-I", "-S", write_copy.__file__, *arguments],
        stdout=write_end,
        stderr=subprocess.PIPE,
        pass_fds=[held.descriptor],
        timeout=LIMIT_S,
        check=True,
    )
    os.close(write_end)
    assert done.stderr == b""
    assert (tmp_path / "file").stat().st_size == block


@pytest.mark.usefixtures("program")
def test_the_process_computes_behind_all_others(buffer: HostBuffer, tmp_path: Path) -> None:
    writer, before = CopyWriter(), own_children()
    writing = halted(writer, buffer, tmp_path / "file")
    (pid,) = own_children() - before
    assert os.sched_getscheduler(pid) == os.SCHED_IDLE
    assert os.getpriority(os.PRIO_PROCESS, pid) == LOWEST_PRIORITY
    writer.hurry()
    writing.result(LIMIT_S)


def test_memory_goes_with_its_buffer() -> None:
    held = HostBuffer()
    held.hold(NUM_BYTES, pinned=False)
    inode = os.fstat(held.descriptor).st_ino
    assert inode in open_files()
    del held
    assert inode not in open_files()


def open_files() -> set[int]:
    """Inodes of what this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed
            found.add(os.fstat(int(name)).st_ino)
    return found


def test_page_locked_memory_is_let_go_before_it_is_unmapped(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[tuple[int, ...]] = []
    fails = [0, 0, 2]

    def register(*memory: int) -> int:
        calls.append(memory)
        return fails.pop(0)

    cudart = SimpleNamespace(
        cudaHostRegister=register, cudaHostUnregister=lambda address: calls.append((address,))
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    held = HostBuffer()
    addresses = []
    for num_bytes in (10, 5, 10_000):
        held.hold(num_bytes, pinned=True)
        addresses.append(held.bytes.data_ptr())
    first, second = addresses[0], addresses[-1]
    assert calls == [(first, 10, 0), (first,), (second, 10_000, 0)]
    del held
    assert calls[3:] == [(second,)]

    HostBuffer().hold(10, pinned=True)  # works all the same
    assert (len(calls), caplog.messages) == (5, ["0.00 GiB were not page-locked: CUDA error 2"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_memory_for_tensors_of_a_gpu_is_page_locked_also_when_it_has_grown() -> None:
    held = HostBuffer()
    for num_bytes in (NUM_BYTES, 3 * NUM_BYTES):
        held.hold(num_bytes, pinned=True)
        assert held.bytes.is_pinned()
        ones = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        held.bytes.copy_(ones, non_blocking=True)
        torch.cuda.synchronize()
        assert bytes(held.view(num_bytes)) == b"\x01" * num_bytes
