"""Loaded last by the server of forked processes (`PRELOADED` in `tests/conftest.py`).

What it has loaded stays: the garbage collector of a process need not walk it, nor copy its pages.
And these are huge ones, of 2 MiB, where the system has them: a fork copies the list of all pages,
which is two thirds of its time where they are of 4 KiB.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator

HUGE = 2**21
MADV_COLLAPSE = 25


def own_memory() -> Iterator[tuple[int, int]]:
    """Return the ranges of the process's memory that belong to no file."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            place, access, _, _, inode, *_ = line.split()
            if access == "rw-p" and inode == "0":
                first, last = place.split("-")
                yield int(first, 16), int(last, 16)


def make_pages_huge() -> None:
    """Use huge pages for the ranges; a system without them leaves the ranges unchanged."""
    madvise = ctypes.CDLL(None).madvise
    for first, last in list(own_memory()):
        for address in range(-(-first // HUGE) * HUGE, last - HUGE + 1, HUGE):
            madvise(ctypes.c_void_p(address), ctypes.c_size_t(HUGE), MADV_COLLAPSE)


gc.collect()
gc.freeze()
make_pages_huge()
