"""The children and descendants of a process, and processes by a variable of their environment."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator

from verl_like.process.machine import IS_LINUX, proc_fields


def children(pid: int) -> Iterator[int]:
    """Yield the children of a process; none without /proc."""
    tasks = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):  # that process is gone
        for thread in os.listdir(tasks):
            yield from map(int, proc_fields(f"{tasks}/{thread}/children"))


def descendants(pid: int) -> list[int]:
    """Return the children of a process and their descendants, without /proc as `ps` lists them."""
    children_of = children if IS_LINUX else _children_by_ps()
    processes: list[int] = []
    ahead = [pid]
    while ahead:
        started = list(children_of(ahead.pop()))
        processes += started
        ahead += started
    return processes


def _children_by_ps() -> Callable[[int], list[int]]:
    """Return a function from a process to its children."""
    table = subprocess.run(
        ["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False
    )
    by_parent: dict[int, list[int]] = {}
    for pid, parent in (map(int, line.split()) for line in table.stdout.splitlines()):
        by_parent.setdefault(parent, []).append(pid)
    return lambda parent: by_parent.get(parent, [])


def processes_with(variable: bytes) -> list[int]:
    """Return the processes that were started with this NAME=value; none without /proc."""
    if not IS_LINUX:
        return []
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if variable in b" ".join(proc_fields(f"/proc/{pid}/environ"))]
