"""Copies in shared memory, written by a process of its own while this one trains.

    writer.begin()
    facts = writer.write(path, buffer)    # in a thread; waits for the process (`write_copy`)
    writer.hurry()                        # from another thread: somebody waits for the file
    writer.drop()                         # from another thread: nobody wants it any more

A thread of this process would hold the interpreter's lock now and then, without the priority to go
on and give it back. What the process leaves when it is ended is written here.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

from verl_like.errors import CheckpointError
from verl_like.process.machine import process_state
from workers.training import write_copy
from workers.training.host_buffer import HostBuffer
from workers.training.write_copy import FAILED, WHOLE, Written, write_rest

LOWEST_PRIORITY = 19
LEAST_BYTES = 4 * 2**20
"""A smaller file is written sooner than a process starts."""
PATIENCE_S = 5.0
"""A block takes some 20 ms of a core; without any for so long, no core has time to spare."""
logger = logging.getLogger(__name__)


class CopyWriter:
    """Writes one file at a time, each with a process of its own that ends with it."""

    def __init__(self) -> None:
        """Nothing is written yet."""
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_waited_for = self._is_dropped = self._is_starved = False

    def begin(self) -> None:
        """The next files are wanted, and nobody waits for them yet."""
        self._is_waited_for = self._is_dropped = self._is_starved = False

    def hurry(self) -> None:
        """Write the rest in this process, with its priority."""
        self._is_waited_for = True
        self._end_process()

    def drop(self) -> None:
        """Write no further."""
        self._is_dropped = True
        self._end_process()

    def write(self, path: Path, buffer: HostBuffer, num_bytes: int) -> dict[str, int]:
        """Write so many bytes into the file, to the disk; gives its fingerprint."""
        is_whole, written = self._write_elsewhere(path, buffer, num_bytes)
        if not is_whole:
            written = self._write_here(path, buffer.view(num_bytes), written)
        return {"bytes": written[0], "crc32": written[1]}

    def _write_here(self, path: Path, contents: memoryview, written: Written) -> Written:
        """What is there at the end, after what was written before."""
        self._refuse_if_dropped(path)
        for so_far in write_rest(path, contents, written):
            self._refuse_if_dropped(path)
            written = so_far
        return written

    def _write_elsewhere(
        self, path: Path, buffer: HostBuffer, num_bytes: int
    ) -> tuple[bool, Written]:
        """What a process of its own has written, and whether it is all of it."""
        is_whole, written = False, (0, 0)
        process = self._start(path, buffer.descriptor, num_bytes)
        if process is None:
            return is_whole, written

        with process:
            for said in self._lines(process):
                if said.startswith(FAILED):
                    raise CheckpointError(f"{path}: {said.removeprefix(FAILED)}")
                is_whole = said == WHOLE
                if not is_whole:
                    num_written, crc = map(int, said.split())
                    written = num_written, crc
        if not (is_whole or self._is_waited_for or self._is_dropped):
            logger.warning(
                "%s: the process that wrote it %s after %d of %d bytes; the rest is written by the "
                "one that trains.",
                path,
                "got no time from busy cores" if self._is_starved else _ending(process.returncode),
                written[0],
                num_bytes,
            )
        return is_whole, written

    def _start(self, path: Path, descriptor: int, num_bytes: int) -> subprocess.Popen[bytes] | None:
        """The process; None if none is wanted, or can be had."""
        program = [sys.executable, "-I", "-S", write_copy.__file__]
        with self._lock:
            wants_none = self._is_waited_for or self._is_dropped or self._is_starved
            if num_bytes < LEAST_BYTES or wants_none:
                return None
            try:
                self._process = subprocess.Popen(
                    [*program, str(descriptor), str(num_bytes), str(path)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    bufsize=0,
                    pass_fds=[descriptor],
                    process_group=0,  # Ctrl-C is for the driver
                )
            except OSError as error:
                logger.warning("%s is written by the process that trains: %s", path, error)
                return None
            _compute_behind_others(self._process.pid)
            return self._process

    def _lines(self, process: subprocess.Popen[bytes]) -> Iterator[str]:
        """What it says, until it ends, or is ended since it gets no time."""
        assert process.stdout is not None, "it was asked for"
        rest = ""
        while True:
            while not wait([process.stdout], PATIENCE_S):
                if _wants_a_core(process.pid):
                    self._is_starved = True
                    process.kill()
            # one read: each takes the interpreter's lock from whoever trains
            chunk = os.read(process.stdout.fileno(), 4096).decode()
            if not chunk:
                return
            *lines, rest = (rest + chunk).split("\n")
            yield from lines

    def _end_process(self) -> None:
        with self._lock:
            if self._process is not None:
                self._process.kill()

    def _refuse_if_dropped(self, path: Path) -> None:
        if self._is_dropped:
            raise CheckpointError(f"{path} was given up")


def _compute_behind_others(pid: int) -> None:
    """Let a process have what no other wants of the cores and, on Linux, of the disk.

    Also its start, a hundredth of a second: so it does not say this itself.
    """
    with suppress(OSError):  # it has ended, or a container forbids it
        os.setpriority(os.PRIO_PROCESS, pid, LOWEST_PRIORITY)
        if hasattr(os, "SCHED_IDLE"):
            os.sched_setscheduler(pid, os.SCHED_IDLE, os.sched_param(0))


def _wants_a_core(pid: int) -> bool:
    """Whether a process could go on at once; not if it waits for the disk."""
    return process_state(pid) in ("R", "T")


def _ending(code: int) -> str:
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
    return f"ended {how}"
