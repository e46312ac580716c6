"""What belongs to one role of a process: its instance, its random state, its log file."""

from __future__ import annotations

import io
import random
import sys
import zlib
from typing import Any, TextIO

import numpy as np
import torch

from verl_like.process.facts import ProcessFacts
from verl_like.process.random_state import get_random_state, set_random_state


class RoleState:
    """One role of a process; inside `with state:` what is printed goes to the role's log too."""

    def __init__(self, role: str, facts: ProcessFacts):
        """The random state starts from (seed, role, rank), whoever shares the process."""
        self.worker: Any = None
        self.log: TextIO | None = None
        self._teed: tuple[TextIO, TextIO] | None = None
        path = facts.log_path(role)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.log = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 - open as long as the process lives
        seed = zlib.crc32(f"{facts.seed}/{role}/{facts.rank}".encode())
        saved = get_random_state()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
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


class _Tee(io.TextIOBase):
    """Writes to the process's own stream and to the role's log."""

    def __init__(self, *streams: TextIO):
        self.streams = streams

    def write(self, text: str) -> int:
        for stream in self.streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self.streams:
            stream.flush()
