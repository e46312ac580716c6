"""What this machine has, cores and memory, and what its processes do."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

CONTAINER = Path("/sys/fs/cgroup")
"""The files of this process's control group."""


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def process_state(pid: int) -> str | None:
    """What a process does, by Linux's letter: R runs, T is stopped, Z has ended, unawaited.

    None if there is no such process, or the system does not say.
    """
    fields = _fields_of(pid)
    return fields[0] if fields else None


def cpu_s_of(pid: int) -> float:
    """Processor time that a process has used; 0 when it is gone, or the system does not say."""
    fields = _fields_of(pid)
    user, system = fields[11:13] if fields else ("0", "0")
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _fields_of(pid: int) -> list[str]:
    """What Linux says of a process, after the program's name, which may be any text."""
    try:
        facts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return facts.rpartition(")")[2].split()


def children(pid: int) -> Iterator[int]:
    """The processes that a process has started and that are there; none without /proc."""
    tasks = f"/proc/{pid}/task"
    with contextlib.suppress(OSError):  # that process is gone
        for thread in os.listdir(tasks):
            yield from map(int, words_of(f"{tasks}/{thread}/children"))


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have; none without /proc."""
    found: list[int] = []
    ahead = [pid]
    while ahead:
        started = list(children(ahead.pop()))
        found += started
        ahead += started
    return found


def resident_bytes(pid: int) -> int | None:
    """Memory that a process holds now; None when it is gone, or the system does not say."""
    words = words_of(f"/proc/{pid}/statm")
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else None


def words_of(path: str) -> list[bytes]:
    """The words of a file in /proc; an empty list if its process is gone.

    Read without a file object: whoever watches processes asks for many of them.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return []
    content = b""
    try:
        while chunk := os.read(file, 65536):
            content += chunk
    except OSError:  # its process has gone meanwhile
        return []
    finally:
        os.close(file)
    return content.split()


def memory_gb(field: str) -> float | None:
    """A line of /proc/meminfo ("MemTotal:", "MemAvailable:") in GiB; None where there is none."""
    table = Path("/proc/meminfo")
    if not table.is_file():
        return None
    lines = (line.split() for line in table.read_text(encoding="ascii").splitlines())
    return next((int(words[1]) / 2**20 for words in lines if words[0] == field), None)


def free_memory_gb(container: Path = CONTAINER) -> float | None:
    """What the machine has, or less where the control group at `container` leaves less.

    What the group has cached of files makes room for others.
    """
    free = memory_gb("MemAvailable:")
    limits = [container / "memory.max", container / "memory.current"]
    if free is None or not all(path.is_file() for path in limits):
        return free
    most, taken = (path.read_text(encoding="ascii").strip() for path in limits)
    if most == "max":
        return free
    return min(free, (int(most) - int(taken) + _cached_bytes(container)) / 2**30)


def _cached_bytes(container: Path) -> int:
    table = container / "memory.stat"
    if not table.is_file():
        return 0
    lines = (line.split() for line in table.read_text(encoding="ascii").splitlines())
    return next((int(words[1]) for words in lines if words[0] == "inactive_file"), 0)
