"""Processes of this machine that are stopped (SIGSTOP): they answer nothing, and do not end."""

from __future__ import annotations

import time
from collections.abc import Callable

from verl_like.process.machine import process_state

STOPPED = "T"
STOPPED_S = 15.0
"""A process that is stopped for so long does not count on being continued."""


class StoppedProcesses:
    """Since when processes have been stopped, as far as somebody has looked."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[int, float] = {}

    def why_gone(self, pid: int) -> str | None:
        """Why a process is not waited for any more; None while it runs, or may go on soon."""
        if process_state(pid) != STOPPED:
            self._since.pop(pid, None)
            return None
        now = self._clock()
        if now - self._since.setdefault(pid, now) < STOPPED_S:
            return None
        return (
            f"the process is stopped since {STOPPED_S:.0f} s (SIGSTOP, by hand or by a scheduler); "
            f"`kill -CONT {pid}` lets one go on."
        )
