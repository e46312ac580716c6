"""Loaded last by the server of forked processes (`PRELOADED` in `tests/conftest.py`).

The loaded modules stay: the garbage collector of a fork need not walk them, so their pages are not
copied. If the system has huge pages of 2 MiB, they are used: with pages of 4 KiB, a fork spends two
thirds of its time on copying the list of pages.
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
