"""Sums and maxima by name: figures that parts of a batch, on several ranks, add up to."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch.distributed as dist
from torch import Tensor

Numbers = Mapping[str, "float | Tensor"]


class Gauge:
    """Collects figures over any number of parts of a batch."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.maxima: dict[str, float] = {}

    def note(self, sums: Numbers, maxima: Numbers | None = None) -> None:
        """Take in the figures of one part."""
        for name, value in sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in (maxima or {}).items():
            largest = np.maximum(self.maxima.get(name, -np.inf), float(value))  # a NaN stays one
            self.maxima[name] = float(largest)

    def all_reduce(self, group: dist.ProcessGroup | None) -> None:
        """Add up over ranks; collective."""
        if group is None:
            return
        of_ranks: list[tuple[Numbers, Numbers]] = [({}, {}) for _ in range(group.size())]
        dist.all_gather_object(of_ranks, (self.sums, self.maxima), group=group)
        self.sums, self.maxima = {}, {}
        for figures in of_ranks:
            self.note(*figures)
