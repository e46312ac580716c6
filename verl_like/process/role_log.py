"""A role of a worker process: its worker, its random state, and its log.

state = RoleState("actor", process_info)
with state:
    print("this line is also in the role's log")
"""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from verl_like.masking import mask_text
from verl_like.process.info import (
    ProcessInfo,
    environment,
    loopback_environment,
    torchrun_environment,
)
from verl_like.process.random_state import get_random_state, set_random_state

LONE_SURROGATES = "backslashreplace"
"""The error handler for characters that no file can hold; samples may contain them."""


class RoleState:
    """One role of a process. Inside `with state:`, prints go to the role's log, too."""

    def __init__(self, role: str, process_info: ProcessInfo):
        """Seed the random state with (seed, role, rank), even if roles share the process."""
        self.worker: Any = None
        self.first_meshes: Any = None
        """The meshes that were registered when the roles of the process had been constructed."""
        self.log: RotatingLog | None = None
        self._teed: tuple[TextIO, TextIO] | None = None
        path = process_info.log_path(role)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.log = RotatingLog(path)
        seed = zlib.crc32(f"{process_info.seed}/{role}/{process_info.rank}".encode())
        saved = get_random_state()
        random.seed(seed)
        np.random.seed(seed)
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:  # `torch.manual_seed` would keep a stack as text for every absent kind of device
            torch.default_generator.manual_seed(seed)
        self.random_state = get_random_state()
        set_random_state(saved)

    @property
    def meshes(self) -> Any:
        """The meshes that the worker has registered: the same dict until it registers another."""
        return getattr(self.worker, "_mesh_positions", None)

    def close(self) -> None:
        """Close the log; later output goes only to the process's own stream."""
        if self.log is not None:
            self.log.close()
            self.log = None

    def __enter__(self) -> None:
        """Send output to the role's log, too."""
        self._streams = sys.stdout, sys.stderr
        if self.log is not None:
            if self._teed != self._streams:
                self._teed = self._streams
                self._tees = _Tee(sys.stdout, self.log), _Tee(sys.stderr, self.log)
            sys.stdout, sys.stderr = self._tees

    def __exit__(self, *_: object) -> None:
        """Restore the streams."""
        sys.stdout, sys.stderr = self._streams


class RoleTurns:
    """Makes the log and the random state of a role those of the process during the role's call.

    In a process of their own they stay until another role's turn comes. In the caller's thread they
    end with the call, together with torchrun's environment variables.
    """

    def __init__(self, process_info: ProcessInfo, in_callers_thread: bool) -> None:
        self._in_callers_thread = in_callers_thread
        self._process_info = process_info
        self._current: RoleState | None = None
        self._variables = torchrun_environment(process_info, ("127.0.0.1", 0))

    def take(self, state: RoleState) -> AbstractContextManager[Any]:
        """Return the context of a call of this role."""
        if self._in_callers_thread:
            return self._borrow_process(state)
        if self._current is not state:
            if self._current is not None:
                self._current.random_state = get_random_state()
                self._current.__exit__()
            set_random_state(state.random_state)
            state.__enter__()
            self._current = state
        return nullcontext()

    def end(self) -> None:
        """End the turn of the last role, whose log will be closed."""
        if self._current is not None and not self._in_callers_thread:
            self._current.__exit__()
        self._current = None

    @contextmanager
    def _borrow_process(self, state: RoleState) -> Iterator[None]:
        if self._current is state:  # a call within a call
            yield
            return
        outer, caller = self._current, get_random_state()
        set_random_state(state.random_state)
        self._current = state
        variables = {**loopback_environment(self._process_info), **self._variables}
        try:
            with environment(variables), state:
                yield
        finally:
            state.random_state, self._current = get_random_state(), outer
            set_random_state(caller)


class RotatingLog(io.TextIOBase):
    """A log of limited size: when it is full, its content moves to a second file, `.1`.

    The file is emptied in place, because the process writes a crash into the same open file.
    """

    LIMIT = 16 * 2**20
    """Maximum size of each of the two files, in bytes."""

    def __init__(self, path: Path) -> None:
        """Append to the file."""
        self._path = path
        self._file = path.open("a", buffering=1, encoding="utf-8", errors=LONE_SURROGATES)
        self._num_bytes = path.stat().st_size

    def write(self, text: str) -> int:
        """Append the text; a full file is first copied to `.1` and emptied."""
        if self._num_bytes > self.LIMIT:
            self._file.flush()
            shutil.copyfile(self._path, self._path.with_name(self._path.name + ".1"))
            os.truncate(self._path, 0)
            self._num_bytes = 0
        self._num_bytes += len(text.encode(errors=LONE_SURROGATES))
        return self._file.write(text)

    def flush(self) -> None:
        """Write the buffered text to the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the log and its file."""
        super().close()
        self._file.close()


class _Tee(io.TextIOBase):
    """A stream that writes to the process's own stream and to the role's log, without secrets."""

    def __init__(self, *streams: TextIO | RotatingLog):
        self.streams = streams

    def write(self, text: str) -> int:
        masked = mask_text(text)
        for stream in self.streams:
            try:
                stream.write(masked)
            except UnicodeEncodeError as error:
                stream.write(masked.encode(error.encoding, LONE_SURROGATES).decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            stream.flush()
