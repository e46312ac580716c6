"""Columns that come over a process border, in memory of this process. Large ones lie on large pages.

Numpy asks the kernel for large pages, torch does not: then the kernel's work for fresh memory, of which a batch that
arrives needs a lot at once, takes longer than the copy itself. Called by `verl_like.columns` and `verl_like.protocol`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

LARGE_BYTES = 1 << 22
"""Numpy asks for large pages from this size on."""


def copy_of(column: torch.Tensor) -> torch.Tensor:
    """The same values in memory of their own."""
    room = _room([*column.shape], [column])
    return column.clone() if room is None else room.copy_(column)


def join_rows(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows of all parts, in order."""
    return torch.cat(list(parts), out=_room([sum(map(len, parts)), *parts[0].shape[1:]], parts))


def _room(shape: list[int], parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Memory for a large column on the CPU through which no gradient flows; None: torch makes its own."""
    num_bytes = math.prod(shape) * parts[0].element_size()
    if num_bytes < LARGE_BYTES or any(part.device.type != "cpu" or part.requires_grad for part in parts):
        return None
    return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(parts[0].dtype).view(shape)
