"""Memory that a CPU process keeps for its next tensor instead of giving it back to the system.

On the CPU a tensor of some megabytes is, by default, fresh memory from the system each time: every
page is mapped and zeroed at its first touch, which takes as long as the arithmetic on it. An update
makes hundreds of such tensors, the driver dozens a step.
"""

from __future__ import annotations

import ctypes
import os

LARGEST_KEPT = 2**30
"""Bytes of the largest tensor whose memory is kept; larger ones are mapped anew."""
MOST_KEPT = 2**31 - 1
"""Free bytes at the end of the heap that are kept."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Have the allocator keep what is freed, for the next tensor; returns whether it does now.

    It does not where the user has set the allocator (GLIBC_TUNABLES, MALLOC_…), or where it is not
    glibc's.
    """
    chosen = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if chosen or mallopt is None:
        return False

    keeps_large = bool(mallopt(_MMAP_THRESHOLD, LARGEST_KEPT))
    return keeps_large and bool(mallopt(_TRIM_THRESHOLD, MOST_KEPT))
