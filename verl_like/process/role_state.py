"""What belongs to one role of a process: its instance, its random state, its log file."""

from __future__ import annotations

import io
import os
import random
import shutil
import sys
import zlib
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from verl_like.masking import mask_text
from verl_like.process.facts import ProcessFacts
from verl_like.process.random_state import get_random_state, set_random_state

LONE_SURROGATES = "backslashreplace"
"""How a text is printed that has characters which no file can hold: a sample may."""


class RoleState:
    """One role of a process; inside `with state:` what is printed goes to the role's log too."""

    def __init__(self, role: str, facts: ProcessFacts):
        """The random state starts from (seed, role, rank), whoever shares the process."""
        self.worker: Any = None
        self.log: RotatingLog | None = None
        self._teed: tuple[TextIO, TextIO] | None = None
        path = facts.log_path(role)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.log = RotatingLog(path)
        seed = zlib.crc32(f"{facts.seed}/{role}/{facts.rank}".encode())
        saved = get_random_state()
        random.seed(seed)
        np.random.seed(seed)
        if torch.cuda.is_available():
            torch.manual_seed(seed)
        else:  # for each kind of device that is not there the above keeps the stack as text
            torch.default_generator.manual_seed(seed)
        self.random_state = get_random_state()
        set_random_state(saved)

    def close(self) -> None:
        """Close the log; what is printed later goes to the process's own stream only."""
        if self.log is not None:
            self.log.close()
            self.log = None

    def __enter__(self) -> None:
        """From now on what is printed goes to the role's log too."""
        self._streams = sys.stdout, sys.stderr
        if self.log is not None:
            if self._teed != self._streams:
                self._teed = self._streams
                self._tees = _Tee(sys.stdout, self.log), _Tee(sys.stderr, self.log)
            sys.stdout, sys.stderr = self._tees

    def __exit__(self, *_: object) -> None:
        """As it was before."""
        sys.stdout, sys.stderr = self._streams


class RotatingLog(io.TextIOBase):
    """A log that does not grow for ever: what is older than its newest megabytes goes to `.1`.

    The file keeps its place and whoever has it open: a crash is written into it, too.
    """

    LIMIT = 16 * 2**20
    """Bytes of each of the two."""

    def __init__(self, path: Path) -> None:
        """Go on at the file's end."""
        self._path = path
        self._file = path.open("a", buffering=1, encoding="utf-8", errors=LONE_SURROGATES)
        self._num_bytes = path.stat().st_size

    def write(self, text: str) -> int:
        """At the end of the file, which is emptied first where it is full."""
        if self._num_bytes > self.LIMIT:
            self._file.flush()
            shutil.copyfile(self._path, self._path.with_name(self._path.name + ".1"))
            os.truncate(self._path, 0)
            self._num_bytes = 0
        self._num_bytes += len(text.encode(errors=LONE_SURROGATES))
        return self._file.write(text)

    def flush(self) -> None:
        """Write what is buffered to the file."""
        self._file.flush()

    def close(self) -> None:
        """Close the log and its file."""
        super().close()
        self._file.close()


class _Tee(io.TextIOBase):
    """Writes to the process's own stream and to the role's log, without secrets."""

    def __init__(self, *streams: TextIO | RotatingLog):
        self.streams = streams

    def write(self, text: str) -> int:
        shown = mask_text(text)
        for stream in self.streams:
            try:
                stream.write(shown)
            except UnicodeEncodeError as error:
                stream.write(shown.encode(error.encoding, LONE_SURROGATES).decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            stream.flush()
