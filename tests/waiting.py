"""Wait for another thread or process: as short as possible, and long under load."""

from __future__ import annotations

import time
from collections.abc import Callable

from verl_like.process.machine import process_state

LIMIT_S = 60.0
"""Seconds after which a wait fails, even on a loaded machine."""


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"the condition did not hold within {LIMIT_S:g} s"
        time.sleep(0.002)


def is_running(pid: int) -> bool:
    """True if a process exists and has not ended, even if nobody has waited for it."""
    return process_state(pid) not in (None, "Z")


def wait_until_ended(*pids: int) -> None:
    wait_until(lambda: not any(map(is_running, pids)))
