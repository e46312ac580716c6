"""Sums and maxima by name, accumulated over rows and ranks."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.distributed as dist
from torch import Tensor

Numbers = Mapping[str, "float | Tensor"]


class Gauge:
    """Accumulates sums and maxima over any number of micro-batches."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}

    def note(self, sums: Numbers, maxima: Numbers | None = None) -> None:
        """Add the numbers of some rows."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in (maxima or {}).items():
            largest = np.maximum(self.maxima.get(name, -np.inf), float(value))  # NaN wins
            self.maxima[name] = float(largest)

    def all_reduce(self, group: dist.ProcessGroup | None) -> None:
        """Combine over ranks; collective."""
        if group is None:
            return
        of_ranks: list[tuple[Numbers, Numbers]] = [({}, {}) for _ in range(group.size())]
        dist.all_gather_object(of_ranks, (self.sums, self.maxima), group=group)
        self.sums, self.maxima = {}, {}
        for figures in of_ranks:
            self.note(*figures)
