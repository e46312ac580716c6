"""Files of a checkpoint as copies in host memory, which are written while training goes on:
`trainer.async_save`.

The driver calls, on every rank of a role that `SavesInBackground`:

    start_checkpoint(path, step)     # in its turn: copies; training goes on
    write_checkpoint()               # past the queue, beside the steps: writes
    hurry_checkpoint(is_wanted)      # past the queue: somebody waits for it, or wants it no more

A process of low priority writes a file (`workers.training.write_copy`). A thread would hold the
interpreter's lock now and then, without the priority to go on and give it back. What the process
leaves when it is ended is written here.
"""

from __future__ import annotations

import json
import logging
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import CheckpointError
from verl_like.process.machine import free_memory_gb
from verl_like.process.worker import Worker
from workers.models.tensor_files import FileWriter, bytes_of
from workers.parallel.page_lock import lock_pages
from workers.training import write_copy

LEAST_BYTES = 16 * 2**20
"""A smaller file is written sooner than a copy of it, and a process, would pay."""
MOST_OF_FREE = 0.5
"""The share of the free host memory that the copies of all ranks may take."""
LOWEST_PRIORITY = 19
"""Beside busy processes it gets 1.5 % of a core, and goes on; with SCHED_IDLE it could starve."""
Files = dict[str, dict[str, int]]
"""Name within a role's folder -> bytes and crc32."""
logger = logging.getLogger(__name__)


class SavesInBackground(Worker):
    """A worker whose `save_checkpoint` writes its large files by `self.copies`."""

    background_from_bytes: ClassVar[int] = LEAST_BYTES
    """Smaller files are written while the worker is waited for."""
    copies: FileCopies | None = None
    """Takes files while `start_checkpoint` runs; None: they are written at once."""
    _own_copies: FileCopies | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_checkpoint(self, path: str, step: int = 0) -> bool:
        """`save_checkpoint`, but large files are copied; gives whether any is left to write."""
        if self._own_copies is None:
            self._own_copies = FileCopies(self.background_from_bytes)
        self._own_copies.begin(Path(path))
        self.copies = self._own_copies
        try:
            self.save_checkpoint(path, step)
        finally:
            self.copies = None
        return self._own_copies.are_there

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def write_checkpoint(self) -> Files:
        """Write what was copied, beside whatever is being computed."""
        assert self._own_copies is not None, "start_checkpoint comes first"
        try:
            return self._own_copies.write()
        except CheckpointError as error:
            raise CheckpointError(f"rank {self.rank}: {error}") from error

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def hurry_checkpoint(self, is_wanted: bool = True) -> None:
        """Write the rest as fast as it goes, or nothing more if it is wanted no longer."""
        assert self._own_copies is not None, "start_checkpoint comes first"
        self._own_copies.hurry(is_wanted)


class FileCopies(FileWriter):
    """The files of one checkpoint of a role, on one rank; small ones are written at once.

    copies.begin(folder)
    write_shards(tensors, folder, rank, num_ranks, copies)    # copies; the tensors may change
    files = copies.write()                                    # in another thread
    copies.hurry(is_wanted)                                   # from a third
    """

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        self.least_bytes = least_bytes
        self.folder = Path()
        """Of the role, in the checkpoint."""
        self._files: dict[Path, _FileCopy] = {}
        self._spare: list[_FileCopy] = []
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_waited_for = self._is_dropped = self._has_warned = False

    @property
    def are_there(self) -> bool:
        """Whether there is anything to write."""
        return bool(self._files)

    def begin(self, folder: Path) -> None:
        """Forget what was written; the next files are those of a checkpoint in `folder`."""
        self._spare += self._files.values()
        self._files, self.folder = {}, folder
        self._is_waited_for = self._is_dropped = False

    def add(self, path: Path, header: bytes, tensors: Sequence[Tensor]) -> None:
        num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        if num_bytes < self.least_bytes or not self._has_room(num_bytes):
            super().add(path, header, tensors)
            return
        copy = self._spare.pop(0) if self._spare else _FileCopy()
        copy.fill(header, tensors)
        self._files[path] = copy

    def _has_room(self, num_bytes: int) -> bool:
        """Whether the host has memory for such a copy on each of its ranks."""
        spare = len(self._spare[0].bytes) if self._spare else 0
        wanted = (num_bytes - spare) / 2**30
        free, num_here = free_memory_gb(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if wanted <= 0 or free is None or wanted * num_here <= MOST_OF_FREE * free:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "trainer.async_save: host memory has no room for a copy of the checkpoint (%.2f "
                "GiB on each of %d ranks, %.2f GiB are free): training waits while it is written.",
                *(wanted, num_here, free),
            )
        return False

    def rename(self, path: Path, name: Path) -> None:
        if path in self._files:
            self._files[name] = self._files.pop(path)
        else:
            super().rename(path, name)

    def write(self) -> Files:
        """Write every file, to the disk; what is written is as it was when it was copied."""
        found: Files = {}
        for path, copy in self._files.items():
            try:
                found[path.relative_to(self.folder).as_posix()] = self._write(path, copy)
            except OSError as error:
                raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
        return found

    def hurry(self, is_wanted: bool = True) -> None:
        """Have a `write` in another thread end, or do the rest itself, with its own priority."""
        with self._lock:
            self._is_waited_for, self._is_dropped = True, not is_wanted
            if self._process is not None:
                self._process.kill()

    def _write(self, path: Path, copy: _FileCopy) -> dict[str, int]:
        """By a process of its own, unless somebody waits; what it leaves is written here."""
        start = 0
        process = self._start(path, copy)
        if process is not None:
            if facts := self._result_of(process, path):
                return facts
            start = path.stat().st_size if path.exists() else 0

        def go_on(_: float = 0.0) -> None:
            if self._is_dropped:
                raise CheckpointError(f"{path} was given up")

        go_on()
        return write_copy.write_file(path, copy.contents, start, go_on)

    def _start(self, path: Path, copy: _FileCopy) -> subprocess.Popen[bytes] | None:
        """The process; None if none is wanted, or can be had."""
        program = [sys.executable, "-I", "-S", write_copy.__file__]
        with self._lock:
            if self._is_waited_for:
                return None
            try:
                self._process = subprocess.Popen(
                    [*program, str(copy.descriptor), str(copy.num_bytes), str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=[copy.descriptor],
                    process_group=0,  # Ctrl-C is for the driver
                )
            except OSError as error:
                logger.warning("%s is written by the process that trains: %s", path, error)
                return None
            with suppress(OSError):  # it has ended, or a container forbids it
                os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
            return self._process

    def _result_of(self, process: subprocess.Popen[bytes], path: Path) -> dict[str, int] | None:
        """The file's fingerprint; None where the process did not come to the end."""
        with process:
            assert process.stdout is not None, "it was asked for"
            said = process.stdout.read()
        if said:
            facts: dict[str, int] = json.loads(said)
            if "error" in facts:
                raise CheckpointError(f"{path}: {facts['error']}")
            return facts
        if not self._is_waited_for:
            code = process.returncode
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            logger.warning(
                "%s: the process that wrote it ended by %s; the rest is written by the one that "
                "trains.",
                *(path, how),
            )
        return None


class _FileCopy:
    """The contents of a file in memory that another process can map, and that GPUs copy into."""

    def __init__(self) -> None:
        self.descriptor = _anonymous_file()
        self.bytes: Tensor = torch.empty(0, dtype=torch.uint8)
        """They grow when more are needed, and stay for the next checkpoint."""
        self.num_bytes = 0
        self._unpin: Callable[[], object] | None = None
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def contents(self) -> memoryview:
        """The file's bytes, without a copy."""
        return memoryview(self.bytes.numpy())[: self.num_bytes]

    def fill(self, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Copy all of it; what the tensors become later does not change it."""
        on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self.num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        self._hold(self.num_bytes, pinned=on_gpu is not None)

        start = 0
        for part in (torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors):
            data = bytes_of(part)
            self.bytes[start : start + len(data)].copy_(data, non_blocking=True)
            start += len(data)
        if on_gpu is not None:
            torch.cuda.synchronize(on_gpu)

    def _hold(self, num_bytes: int, pinned: bool) -> None:
        """Have at least so many bytes, page-locked if `pinned`; they may be others than before."""
        if num_bytes > len(self.bytes):
            if self._unpin is not None:
                self._unpin()
                self._unpin = None
            os.ftruncate(self.descriptor, num_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
        if not pinned or self._unpin is not None:
            return
        self._unpin = lock_pages(self, self.bytes)


def _anonymous_file() -> int:
    """A file in memory without a name; where the system knows none, one on the disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
