"""Memory for large columns: private copies and joined rows lie in blocks of their own.

Fresh memory costs more than the copy into it, because the kernel has to find and clear every page.
So the block under a rectangle that nobody refers to any more is kept, up to `KEPT_BYTES` in all,
for the next one of about its size: rectangles come in the same sizes step after step. The values of
ragged columns never do, and are a tenth as large: their blocks go back to the system at once, which
those of malloc do not.
"""

from __future__ import annotations

import mmap
import weakref

import numpy as np
import torch
from numpy.typing import NDArray

LARGE_BYTES = 1 << 22
"""From this size on a column lies in a block; numpy asks for large pages from there on too."""
UNKEPT_BYTES = 1 << 18
"""From this size on the values of a ragged column lie in pages of their own."""
KEPT_BYTES = 1 << 28
"""Unused blocks are kept up to this size in all."""
STEP_BYTES = 1 << 21
"""Blocks are whole multiples of this, so that columns of nearly one size fit the same ones."""
MOST_SLACK = 1.25
"""A block is used for a column that needs at least its size divided by this."""
Block = NDArray[np.uint8]


class BlockCache:
    """Blocks that no column lies in any more.

    A column may die in any thread and at any time, in the middle of `lend` too. So there is no
    lock: every step on `_unused` is a single operation on a dict.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self.kept_bytes = kept_bytes
        self._unused: dict[int, Block] = {}

    def lend(self, num_bytes: int) -> Block:
        """Memory of that size, a used block if one fits; it comes back when the array dies."""
        block = self._take(num_bytes)
        if block is None:
            block = np.empty(-(-num_bytes // STEP_BYTES) * STEP_BYTES, np.uint8)
        lent = block[:num_bytes]
        # views of a view refer to the block itself, so only whoever holds `lent` may make any:
        # that is the tensor over it, whose own views and arrays keep the tensor alive
        weakref.finalize(lent, self._give_back, block).atexit = False
        return lent

    def unused_bytes(self) -> int:
        """The size of the unused blocks."""
        return sum(block.nbytes for block in list(self._unused.values()))

    def _take(self, num_bytes: int) -> Block | None:
        """The smallest unused block that fits."""
        fitting = []
        for key, block in list(self._unused.items()):
            if num_bytes <= block.nbytes <= max(num_bytes * MOST_SLACK, num_bytes + STEP_BYTES):
                fitting.append((block.nbytes, key))
        for _, key in sorted(fitting):
            taken = self._unused.pop(key, None)
            if taken is not None:  # else another thread was quicker
                return taken
        return None

    def _give_back(self, block: Block) -> None:
        """Keep the block; the ones that have waited longest make room for it."""
        self._unused[id(block)] = block
        while self.unused_bytes() > self.kept_bytes:
            oldest = next(iter(list(self._unused)), None)
            if oldest is not None:
                self._unused.pop(oldest, None)


_blocks = BlockCache()


def copy_of(column: torch.Tensor) -> torch.Tensor:
    """A copy of a column in memory of its own."""
    if column.nbytes < LARGE_BYTES or not _is_plain(column):
        return column.clone()
    return _room(column.shape, column.dtype).copy_(column)


def join_rows(parts: list[torch.Tensor], *, keeps: bool = True) -> torch.Tensor:
    """The rows of all parts, in order; unless it `keeps` blocks, in one that is never kept."""
    size = sum([part.nbytes for part in parts])
    if size < (LARGE_BYTES if keeps else UNKEPT_BYTES) or not all(map(_is_plain, parts)):
        return torch.cat(parts)
    shape, dtype = torch.Size([sum(map(len, parts)), *parts[0].shape[1:]]), parts[0].dtype
    return torch.cat(parts, out=_room(shape, dtype) if keeps else _unkept_room(shape, dtype))


def _unkept_room(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    pages = mmap.mmap(-1, shape.numel() * dtype.itemsize)
    if len(pages) >= LARGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def _is_plain(column: torch.Tensor) -> bool:
    """On the CPU, and no gradient flows through it."""
    return column.device.type == "cpu" and not column.requires_grad


def _room(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose values are whatever the memory held before."""
    lent = _blocks.lend(shape.numel() * dtype.itemsize)
    return torch.from_numpy(lent).view(dtype).view(shape)
