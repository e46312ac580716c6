"""Which share of the weights an update moved: a step below a weight's rounding leaves it as it was.

before = sample_weights(parameters)
...                                               # the first update of a run
counts = count_moved(before, parameters, device)  # added up over the ranks
metrics["moved_share"] = moved_share(*counts, lr)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from workers.models.state import own_part
from workers.parallel.placements import is_first_replica

logger = logging.getLogger(__name__)

MOST_ELEMENTS = 10**6
"""Weights that a rank looks at, evenly over every parameter."""


def sample_weights(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Some elements of every parameter of this rank, copied.

    Of ranks that hold the same part of a parameter the first looks at it.
    """
    own = [own_part(parameter).reshape(-1) for parameter in parameters]
    stride = max(1, -(-sum(map(len, own)) // MOST_ELEMENTS))
    found = []
    for parameter, elements in zip(parameters, own, strict=True):
        is_mine = not isinstance(parameter, DTensor) or is_first_replica(parameter)
        found.append(elements[::stride].clone() if is_mine else elements[:0])
    return found


def count_moved(
    before: Sequence[Tensor], parameters: Sequence[Tensor], device: torch.device
) -> Tensor:
    """How many of this rank's sampled weights are others now, and how many there are."""
    after = sample_weights(parameters)
    pairs = zip(before, after, strict=True)
    moved = torch.stack([(old != new).sum() for old, new in pairs]).sum()
    return torch.stack([moved, torch.full_like(moved, sum(map(Tensor.numel, after)))]).to(device)


def moved_share(num_moved: int, num_sampled: int, lr: float) -> float:
    """The share, with a warning where nothing moved at a learning rate above 0."""
    if num_moved == 0 and lr > 0:
        logger.warning(
            "the first update at a learning rate of %g moved none of the %d weights looked at: "
            "its steps are below their rounding (model.dtype), or every gradient is zero (are all "
            "advantages?).",
            lr,
            num_sampled,
        )
    return num_moved / max(1, num_sampled)
