"""Memory that a CPU process keeps for its next tensor instead of giving it back to the system.

On the CPU a tensor of some megabytes is, by default, fresh memory from the system each time: every
page is mapped and zeroed at its first touch, which takes as long as the arithmetic on it. An update
makes hundreds of such tensors, the driver dozens a step.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

LARGEST_KEPT = 2**30
"""Bytes of the largest tensor whose memory is kept; larger ones are mapped anew."""
LARGEST_OF_RANK = 4_000_000
"""The same for a rank that trains. An aligned tensor does not fit a hole of its own size, so that
large ones leave holes: a fifth of a rank's peak on rows of 16,384 tokens, for a tenth of its time.
"""
MOST_KEPT = 2**31 - 1
"""Free bytes at the end of the heap that are kept."""
LARGEST_OF_HEAP = 2**20
"""Bytes of the largest piece of memory that comes from the heap where none is to be kept."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # numbers of glibc's malloc.h
_kept = {"largest": 0}
"""Bytes of the largest memory that this process keeps."""


def keep_freed_memory(largest: int = LARGEST_KEPT) -> bool:
    """Have the allocator keep what is freed, for the next tensor; returns whether it does now.

    All threads take from one heap: what a backward pass frees, the next forward pass can use.
    It does not where the user has set the allocator (GLIBC_TUNABLES, MALLOC_…), or where it is not
    glibc's.
    """
    chosen = any(name == "GLIBC_TUNABLES" or name.startswith("MALLOC_") for name in os.environ)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if chosen or mallopt is None:
        return False

    keeps = bool(mallopt(_MMAP_THRESHOLD, largest))
    _kept["largest"] = largest * keeps
    settings = mallopt(_TRIM_THRESHOLD, MOST_KEPT), mallopt(_ARENA_MAX, 1)
    return keeps and all(settings)


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
