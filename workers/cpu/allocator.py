"""Memory that a CPU process keeps for its next tensor instead of returning it to the system.

By default glibc takes fresh memory for every tensor of some megabytes: each page is mapped and
zeroed at its first touch, which takes as long as the arithmetic on it. An update allocates hundreds
of such tensors per step, the driver dozens. Keeping the memory takes up to a third more at the peak
of rows of 16,384 tokens, and without it a GRPO step of a small model takes 1.6 times as long. Set
`MALLOC_MMAP_THRESHOLD_=4000000` to trade that time for memory.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

LARGEST_KEPT = 2**30
"""Bytes of the largest tensor whose memory is kept; larger tensors get fresh memory."""
MOST_KEPT = 2**31 - 1
"""Free bytes at the end of the heap that are kept."""
LARGEST_OF_HEAP = 2**20
"""Bytes of the largest piece of memory that comes from the heap where none is to be kept."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h
_kept = {"largest": 0}
"""Bytes of the largest memory that this process keeps."""


def settings_of_user() -> list[str]:
    """Return the variables by which the user has set the allocator, as NAME=value."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if value and (name == "GLIBC_TUNABLES" or name.startswith("MALLOC_"))
    )


def keep_freed_memory() -> bool:
    """Have the allocator keep freed memory for the next tensor; return whether it does now.

    It does not where the user has set the allocator (GLIBC_TUNABLES, MALLOC_…), or where it is not
    glibc's.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if settings_of_user() or mallopt is None:
        return False

    keeps = bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT))
    _kept["largest"] = LARGEST_KEPT * keeps
    return keeps and bool(mallopt(_TRIM_THRESHOLD, MOST_KEPT))


@contextmanager
def freed_at_once() -> Iterator[None]:
    """Within, large memory that is taken goes back to the system as soon as it is freed.

    On a heap that keeps it small things settle in the holes, so that every large piece lengthens
    the heap: by all weights of a model that is only counted, by the buffers of every weight sync.
    """
    if not _kept["largest"]:
        yield
        return
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_MMAP_THRESHOLD, LARGEST_OF_HEAP)
    try:
        yield
    finally:
        mallopt(_MMAP_THRESHOLD, _kept["largest"])
