"""Copies and concatenation of columns, with large results on huge pages.

Numpy asks the kernel for huge pages and torch does not. Without them the kernel's page faults for
fresh memory, of which a batch that arrives needs a lot at once, take longer than the copy itself.
"""

from __future__ import annotations

import numpy as np
import torch

LARGE_BYTES = 1 << 22
"""Numpy asks for huge pages from this size on."""


def copy_of(column: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own."""
    if column.nbytes < LARGE_BYTES or not _is_plain(column):
        return column.clone()
    return _empty(column.shape, column.dtype).copy_(column)


def join_rows(parts: list[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts, in order."""
    if sum([part.nbytes for part in parts]) < LARGE_BYTES or not all(map(_is_plain, parts)):
        return torch.cat(parts)
    shape = torch.Size([sum(map(len, parts)), *parts[0].shape[1:]])
    return torch.cat(parts, out=_empty(shape, parts[0].dtype))


def _is_plain(column: torch.Tensor) -> bool:
    """On the CPU, and no gradient flows through it."""
    return column.device.type == "cpu" and not column.requires_grad


def _empty(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor over memory of numpy's."""
    memory = np.empty(shape.numel() * dtype.itemsize, np.uint8)
    return torch.from_numpy(memory).view(dtype).view(shape)
