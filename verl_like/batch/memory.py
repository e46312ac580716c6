"""Memory for large columns: private copies and joined rows get separate memory blocks.

Fresh memory costs more than the copy into it, because the kernel has to find and clear every page.
When a column is freed, the next column of about the same size therefore reuses its block.
Rectangles have the same sizes in every step, so up to `KEPT_BYTES` of unused blocks are cached. The
values of ragged columns vary in size and are smaller: their blocks return to the system at once,
unlike memory from malloc.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

LARGE_BYTES = 1 << 22
"""Columns of at least this size get a block; from this size on, numpy also requests huge pages."""
UNKEPT_BYTES = 1 << 18
"""Values of a ragged column of at least this size get their own pages."""
KEPT_BYTES = 1 << 28
"""Maximum total size of the unused blocks in the cache."""
STEP_BYTES = 1 << 21
"""Block sizes are multiples of this, so that columns of nearly the same size fit the same
blocks."""
MAX_SLACK = 1.25
"""A block is reused for a column of at least its size divided by this, or minus `STEP_BYTES`."""
Block = NDArray[np.uint8]


class BlockCache:
    """A cache of blocks that no column uses any more.

    A column may be freed in any thread and at any time, even during `lend`. Therefore there is no
    lock: every access to `_unused` is a single operation on a dict.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.kept_bytes = kept_bytes
        self._unused: dict[int, Block] = {}

    def lend(self, num_bytes: int) -> Block:
        """Return an array of that size, in a cached block if one fits.

        When the array is freed, its block returns to the cache.
        """
        block = self._pop_unused(num_bytes)
        if block is None:
            block = np.empty(-(-num_bytes // STEP_BYTES) * STEP_BYTES, np.uint8)
        array = block[:num_bytes]
        # views of a view refer to the block itself, so only the holder of `array` may make any:
        # the tensor over it does, and views and arrays of that tensor keep the tensor alive
        weakref.finalize(array, self._give_back, block).atexit = False
        return array

    def unused_bytes(self) -> int:
        """Return the total size of the unused blocks."""
        return sum(block.nbytes for block in list(self._unused.values()))

    def _pop_unused(self, num_bytes: int) -> Block | None:
        """Remove and return the smallest unused block that fits, or None."""
        fitting = []
        for key, block in list(self._unused.items()):
            if num_bytes <= block.nbytes <= max(num_bytes * MAX_SLACK, num_bytes + STEP_BYTES):
                fitting.append((block.nbytes, key))
        for _, key in sorted(fitting):
            taken = self._unused.pop(key, None)
            if taken is not None:  # otherwise another thread took it first
                return taken
        return None

    def _give_back(self, block: Block) -> None:
        """Cache the block; the blocks that have waited longest are dropped to make room."""
        self._unused[id(block)] = block
        while self.unused_bytes() > self.kept_bytes:
            oldest = next(iter(list(self._unused)), None)
            if oldest is not None:
                self._unused.pop(oldest, None)


_blocks = BlockCache()


def copy_column(column: torch.Tensor) -> torch.Tensor:
    """Return a copy of a column in memory that nothing else uses."""
    if column.nbytes < LARGE_BYTES or not _is_plain(column):
        return column.clone()
    return _room(column.shape, column.dtype).copy_(column)


def join_rows(parts: list[torch.Tensor], *, keeps: bool = True) -> torch.Tensor:
    """Return the rows of all parts, in order; with `keeps`, a large block is cached after use."""
    size = sum([part.nbytes for part in parts])
    if size < (LARGE_BYTES if keeps else UNKEPT_BYTES) or not all(map(_is_plain, parts)):
        return torch.cat(parts)
    shape, dtype = torch.Size([sum(map(len, parts)), *parts[0].shape[1:]]), parts[0].dtype
    return torch.cat(parts, out=_room(shape, dtype) if keeps else _pages(shape, dtype))


def pick_spans(values: torch.Tensor, spans: Iterable[tuple[int, int]]) -> torch.Tensor:
    """Return the values between each start and end, in this order, in new memory.

    On CPUs, numpy must know the dtype.
    """
    if not _is_plain(values):
        return torch.cat([values[:0], *(values[start:end] for start, end in spans)])
    array = values.numpy()  # to slice an array takes a fifth of the time
    picked = [array[:0], *(array[start:end] for start, end in spans)]
    shape, dtype = torch.Size([sum(map(len, picked)), *values.shape[1:]]), values.dtype
    is_small = shape.numel() * dtype.itemsize < UNKEPT_BYTES
    joined = torch.empty(shape, dtype=dtype) if is_small else _pages(shape, dtype)
    np.concatenate(picked, out=joined.numpy())
    return joined


def _is_plain(column: torch.Tensor) -> bool:
    """Return whether the column is on the CPU and carries no gradient."""
    return column.device.type == "cpu" and not column.requires_grad


def _pages(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor; its memory returns to the system when it is freed."""
    pages = mmap.mmap(-1, shape.numel() * dtype.itemsize)
    if len(pages) >= LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _room(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialized tensor."""
    array = _blocks.lend(shape.numel() * dtype.itemsize)
    return torch.from_numpy(array).view(dtype).view(shape)
