"""What this machine has: cores that may be used, memory."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores() -> int:
    """CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_gb(field: str) -> float | None:
    """A line of /proc/meminfo ("MemTotal:", "MemAvailable:") in GiB; None where there is none."""
    table = Path("/proc/meminfo")
    if not table.is_file():
        return None
    lines = (line.split() for line in table.read_text(encoding="ascii").splitlines())
    return next((int(words[1]) / 2**20 for words in lines if words[0] == field), None)
