"""Copies that a separate process writes, and their files when it ends early."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.waiting import wait_until
from verl_like.errors import CheckpointError
from verl_like.files import fingerprint
from verl_like.process.family import children
from workers.training.checkpoints import background_copies, copy_process
from workers.training.checkpoints.background_copies import LOWEST_PRIORITY, FileCopies, Files

LIMIT_S = 60.0
NUM_BYTES = 100_001
CONTENTS = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8)
HALTING = """
import mmap, sys, time

memory, num_bytes, path = sys.argv[1:]
block = mmap.mmap(int(memory), int(num_bytes), prot=mmap.PROT_READ)[:4096]
open(path, "wb").write(block)
open(path + ".halted", "w")
time.sleep(60)
"""
"""A program that writes only one block."""


@pytest.fixture
def copies(tmp_path: Path) -> FileCopies:
    """A file that is not written yet."""
    return with_a_file(tmp_path / "file")


def with_a_file(path: Path) -> FileCopies:
    copies = FileCopies(least_bytes=0)
    copies.begin(path.parent)
    copies.add(path, CONTENTS[:8].numpy().tobytes(), [CONTENTS[8:]])
    return copies


@pytest.fixture
def halted(copies: FileCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Future[Files]:
    """A write whose process has written one block."""
    program = tmp_path / "program.py"
    program.write_text(HALTING)
    monkeypatch.setattr(copy_process, "__file__", str(program))
    pool = ThreadPoolExecutor(1)
    writing = pool.submit(copies.write)
    pool.shutdown(wait=False)
    wait_until((tmp_path / "file.halted").exists)
    return writing


@pytest.fixture
def children_before() -> set[int]:
    """The children before the test; request it before a process is started."""
    return own_children()


def own_children() -> set[int]:
    return set(children(os.getpid()))


def is_whole(files: Files, path: Path) -> bool:
    return files == {"file": fingerprint(path)} and path.read_bytes() == CONTENTS.numpy().tobytes()


def test_a_writer_process_writes_the_file_and_exits(
    copies: FileCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = own_children()
    with monkeypatch.context() as patch:
        patch.delattr(copy_process, "write_file")  # this process cannot write
        files = copies.write()
    assert is_whole(files, tmp_path / "file")
    assert own_children() == before


def test_a_small_file_is_written_at_once_and_renamed(tmp_path: Path) -> None:
    copies = FileCopies(least_bytes=NUM_BYTES + 1)
    copies.begin(tmp_path)
    copies.add(tmp_path / "draft", CONTENTS[:8].numpy().tobytes(), [CONTENTS[8:]])
    copies.rename(tmp_path / "draft", tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == CONTENTS.numpy().tobytes()
    assert not copies.has_files


def test_hurry_writes_the_rest_at_once(
    children_before: set[int],
    copies: FileCopies,
    halted: Future[Files],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    copies.hurry()
    assert is_whole(halted.result(LIMIT_S), tmp_path / "file")
    assert (own_children(), caplog.messages) == (children_before, [])


@pytest.mark.linux
def test_the_rest_of_a_killed_writer_is_written_with_a_warning(
    children_before: set[int],
    halted: Future[Files],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (pid,) = own_children() - children_before
    assert os.getpriority(os.PRIO_PROCESS, pid) == LOWEST_PRIORITY
    os.kill(pid, signal.SIGKILL)
    assert is_whole(halted.result(LIMIT_S), tmp_path / "file")
    (warning,) = caplog.messages
    assert f"{tmp_path / 'file'}: the writer process ended with SIGKILL" in warning


def test_an_abandoned_file_is_not_finished(
    children_before: set[int], copies: FileCopies, halted: Future[Files], tmp_path: Path
) -> None:
    copies.hurry(is_wanted=False)
    with pytest.raises(CheckpointError, match="file was abandoned"):
        halted.result(LIMIT_S)
    assert (tmp_path / "file").stat().st_size == 4096
    assert own_children() == children_before


def test_without_a_writer_process_the_caller_writes_with_a_warning(
    copies: FileCopies,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert is_whole(copies.write(), tmp_path / "file")
    assert ": no writer process could be started (" in caplog.text


def test_a_full_disk_is_an_error_with_the_path() -> None:
    with pytest.raises(CheckpointError, match=r"/dev/full: OSError: .*No space left on device"):
        with_a_file(Path("/dev/full")).write()


def test_a_writer_process_ends_with_its_worker(copies: FileCopies, tmp_path: Path) -> None:
    (copy,) = copies._files.values()
    block = copy_process.BLOCK_BYTES
    os.ftruncate(copy.descriptor, 3 * block)
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", copy_process.__file__),
            *(str(copy.descriptor), str(3 * block), str(tmp_path / "file")),
        ],
        input=b"",  # closed, as if the worker were killed
        capture_output=True,
        pass_fds=[copy.descriptor],
        timeout=LIMIT_S,
    )
    assert (done.stdout, done.stderr) == (b"", b"")
    assert (tmp_path / "file").stat().st_size == block


def test_a_file_is_written_in_blocks_and_from_an_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_process, "BLOCK_BYTES", 4096)
    path, contents, blocks = tmp_path / "file", memoryview(CONTENTS.numpy()), list[float]()
    path.write_bytes(b"of a longer file" * NUM_BYTES)
    written = copy_process.write_file(path, contents, after_block=blocks.append)
    assert written == fingerprint(path)
    assert path.read_bytes() == contents
    assert len(blocks) == -(-NUM_BYTES // 4096)
    os.truncate(path, 5000)
    assert copy_process.write_file(path, contents, 5000) == fingerprint(path)
    assert path.read_bytes() == contents


@pytest.mark.linux
def test_a_deleted_copy_frees_its_memory() -> None:
    copy = background_copies._FileCopy()
    inode = os.fstat(copy.descriptor).st_ino
    assert inode in open_files()
    del copy
    assert inode not in open_files()


def open_files() -> set[int]:
    """Return the inodes of this process's open files."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing is closed
            inodes.add(os.fstat(int(name)).st_ino)
    return inodes


def test_page_locked_memory_is_unlocked_before_it_is_unmapped(
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
    copy = background_copies._FileCopy()
    addresses = []
    for num_bytes in (10, 5, 10_000):
        copy._hold(num_bytes, pinned=True)
        addresses.append(copy.bytes.data_ptr())
    first, second = addresses[0], addresses[-1]
    assert calls == [(first, 10, 0), (first,), (second, 10_000, 0)]
    del copy
    assert calls[3:] == [(second,)]

    background_copies._FileCopy()._hold(10, pinned=True)
    (warning,) = caplog.messages
    assert len(calls) == 5
    assert warning.startswith("0.00 GiB were not page-locked (CUDA error 2)")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")
def test_memory_for_gpu_tensors_is_page_locked_after_it_grows() -> None:
    copy = background_copies._FileCopy()
    for num_bytes in (NUM_BYTES, 3 * NUM_BYTES):
        copy._hold(num_bytes, pinned=True)
        assert copy.bytes.is_pinned()
        ones = torch.ones(num_bytes, dtype=torch.uint8, device="cuda")
        copy.bytes.copy_(ones, non_blocking=True)
        torch.cuda.synchronize()
        assert copy.bytes.numpy().tobytes()[:num_bytes] == b"\x01" * num_bytes
