"""The fraction of the weights that an update changed, estimated from a sample of every weight.

sample = WeightSample(engine)
...                                 # an update
sample.changed_fraction()           # 0 if nothing moved
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from workers.models.state import local_shard
from workers.parallel.placements import is_first_replica, shard_slices
from workers.training.microbatch import all_reduce

if TYPE_CHECKING:
    from workers.training.model import Model

LARGEST_SAMPLE = 4096
"""Elements of a weight that are compared."""


class WeightSample:
    """Copies of some elements of every trained weight, the same elements for every sharding."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.before = [elements.clone() for _, elements in self._elements()]

    def changed_fraction(self) -> float:
        """Return the estimated fraction of changed weights; collective."""
        changed, total = torch.zeros((), dtype=torch.int64, device=self.model.device), 0
        for before, (share, now) in zip(self.before, self._elements(), strict=True):
            changed += share * (now != before).sum()
            total += share * now.numel()
        counts = torch.stack([changed, changed.new_tensor(total)])
        num_changed, num_weights = all_reduce(counts, self.model.groups.world).tolist()
        return float(num_changed / max(num_weights, 1))

    def _elements(self) -> Iterator[tuple[int, Tensor]]:
        """Yield views of this rank's elements, and the number of weights that each represents."""
        named = self.model.module.named_parameters()
        for name, weight in named:
            is_copy = isinstance(weight, DTensor) and not is_first_replica(weight)
            if not weight.requires_grad or name in self.model.layers.copies or is_copy:
                continue
            per_dim = LARGEST_SAMPLE ** (1 / max(weight.dim(), 1))
            strides = [math.ceil(size / per_dim) for size in weight.shape]
            local = local_shard(weight)
            for part in shard_slices(weight):
                # the multiples of the stride in the whole tensor
                places = tuple(
                    slice(here.start + -there.start % stride, here.stop, stride)
                    for here, there, stride in zip(part.local, part.place, strides, strict=True)
                )
                yield math.prod(strides), local[places]
