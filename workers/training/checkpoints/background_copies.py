"""Copies of checkpoint files in host memory that are written while training continues:
`trainer.async_save`.

The driver calls, on every rank of a role that inherits from `BackgroundSaves`:

    start_checkpoint(path, step)     # in order with other calls: copy
    write_checkpoint()               # concurrent with training: write the copies
    hurry_checkpoint(is_wanted)      # concurrent: finish soon, or stop writing

A low-priority process writes a file (`workers.training.checkpoints.copy_process`). A thread would
hold the GIL from time to time, and at low priority it might not release the GIL soon. If the
process is killed, this process writes the rest.
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

import torch
from torch import Tensor

from verl_like.errors import CheckpointError
from verl_like.process.machine import free_memory_gib
from workers.models.tensor_files import LEAST_BYTES, FileWriter, byte_view
from workers.parallel.offload import lock_pages
from workers.training.checkpoints import copy_process

MAX_FREE_FRACTION = 0.5
"""Largest fraction of the free host memory that new copies, one per rank of the host, may take."""
LOWEST_PRIORITY = 19
"""Niceness of the writer, which gets 1.5 % of a busy core; with SCHED_IDLE it could starve."""
Files = dict[str, dict[str, int]]
"""Name within a role's folder -> bytes and crc32."""
logger = logging.getLogger(__name__)


class FileCopies(FileWriter):
    """The files of one checkpoint of a role on one rank; small files are written immediately.

    Example:

        copies.begin(folder)
        write_on_all(ranks, tensors, folder, stage, copies)       # copies; the tensors may change
        files = copies.write()                                    # in another thread
        copies.hurry(is_wanted)                                   # from a third
    """

    def __init__(self, least_bytes: int = LEAST_BYTES) -> None:
        self.least_bytes = least_bytes
        self.folder = Path()
        """Folder of the role in the checkpoint."""
        self._files: dict[Path, _FileCopy] = {}
        self._spare: list[_FileCopy] = []
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_waited_for = self._is_dropped = self._has_warned = False

    @property
    def has_files(self) -> bool:
        """True if there are files to write."""
        return bool(self._files)

    def begin(self, folder: Path) -> None:
        """Forget the written files; the next files belong to a checkpoint in `folder`."""
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
        """True if the host has memory for a copy of this size on each of its ranks."""
        spare = len(self._spare[0].bytes) if self._spare else 0
        needed_gib = (num_bytes - spare) / 2**30
        free, num_here = free_memory_gib(), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if needed_gib <= 0 or free is None or needed_gib * num_here <= MAX_FREE_FRACTION * free:
            return True
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "trainer.async_save: host memory has no room for a copy of a checkpoint file (%.2f "
                "GiB on each of %d ranks; half of the %.2f free GiB may be used), so training "
                "waits while the file is written.",
                *(needed_gib, num_here, free),
            )
        return False

    def rename(self, path: Path, name: Path) -> None:
        if path in self._files:
            self._files[name] = self._files.pop(path)
        else:
            super().rename(path, name)

    def write(self) -> Files:
        """Write every file to disk, with its contents at the time of the copy."""
        files: Files = {}
        for path, copy in self._files.items():
            try:
                files[path.relative_to(self.folder).as_posix()] = self._write(path, copy)
            except OSError as error:
                raise CheckpointError(f"{path}: {type(error).__name__}: {error}") from error
        return files

    def hurry(self, is_wanted: bool = True) -> None:
        """Make a `write` in another thread finish at normal priority if `is_wanted`, or stop."""
        with self._lock:
            self._is_waited_for, self._is_dropped = True, not is_wanted
            if self._process is not None:
                self._process.kill()

    def _write(self, path: Path, copy: _FileCopy) -> dict[str, int]:
        """Write the copy in a separate process, or here if a caller waits or the process fails."""
        start = 0
        process = self._start(path, copy)
        if process is not None:
            if fingerprint := self._result_of(process, path):
                return fingerprint
            start = path.stat().st_size if path.exists() else 0

        def check_not_dropped(_: float = 0.0) -> None:
            if self._is_dropped:
                raise CheckpointError(
                    f"the write of {path} was abandoned, because its checkpoint was dropped"
                )

        check_not_dropped()
        return copy_process.write_file(path, copy.contents, start, check_not_dropped)

    def _start(self, path: Path, copy: _FileCopy) -> subprocess.Popen[bytes] | None:
        """Start the writing process; return None if a caller waits or the process cannot start."""
        program = [sys.executable, "-I", "-S", copy_process.__file__]
        with self._lock:
            if self._is_waited_for:
                return None
            try:
                self._process = subprocess.Popen(
                    [*program, str(copy.descriptor), str(copy.num_bytes), str(path)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    pass_fds=[copy.descriptor],
                    process_group=0,  # Ctrl-C must reach only the driver
                )
            except OSError as error:
                logger.warning(
                    "%s: no writer process could be started (%s); the training process writes the "
                    "file itself, which may slow down steps.",
                    path,
                    error,
                )
                return None
            with suppress(OSError):  # the process has ended, or a container forbids it
                os.setpriority(os.PRIO_PROCESS, self._process.pid, LOWEST_PRIORITY)
            return self._process

    def _result_of(self, process: subprocess.Popen[bytes], path: Path) -> dict[str, int] | None:
        """Return the fingerprint of the file; None if the process did not finish."""
        with process:
            assert process.stdout is not None, "the process has a pipe"
            output = process.stdout.read()
        if output:
            fingerprint: dict[str, int] = json.loads(output)
            if "error" in fingerprint:
                raise CheckpointError(f"{path}: {fingerprint['error']}")
            return fingerprint
        if not self._is_waited_for:
            code = process.returncode
            end = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            logger.warning(
                "%s: the writer process ended with %s; the training process writes the rest.",
                *(path, end),
            )
        return None


class _FileCopy:
    """A file's contents, which another process can map and GPUs can copy into."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("checkpoint")
        else:  # an unnamed file on disk
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self.bytes: Tensor = torch.empty(0, dtype=torch.uint8)
        """The buffer grows when needed and is reused by the next checkpoint."""
        self.num_bytes = 0
        self._unpin: Callable[[], object] | None = None
        weakref.finalize(self, os.close, self.descriptor)

    @property
    def contents(self) -> memoryview:
        """The bytes of the file, without a copy."""
        return self.bytes.numpy().data[: self.num_bytes]

    def fill(self, header: bytes, tensors: Sequence[Tensor]) -> None:
        """Copy everything; later changes of the tensors have no effect."""
        on_gpu = next((tensor.device for tensor in tensors if tensor.is_cuda), None)
        self.num_bytes = len(header) + sum(tensor.nbytes for tensor in tensors)
        self._hold(self.num_bytes, pinned=on_gpu is not None)

        start = 0
        for part in (torch.frombuffer(bytearray(header), dtype=torch.uint8), *tensors):
            data = byte_view(part)
            self.bytes[start : start + len(data)].copy_(data, non_blocking=True)
            start += len(data)
        if on_gpu is not None:
            torch.cuda.synchronize(on_gpu)

    def _hold(self, num_bytes: int, pinned: bool) -> None:
        """Make room for `num_bytes`, page-locked if `pinned`; the buffer may be replaced."""
        if num_bytes > len(self.bytes):
            if self._unpin is not None:
                self._unpin()
                self._unpin = None
            os.ftruncate(self.descriptor, num_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
        if pinned and self._unpin is None:
            self._unpin = lock_pages(self, self.bytes)
