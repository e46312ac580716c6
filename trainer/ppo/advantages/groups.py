"""Groups of samples that share a prompt, with their mean and standard deviation.

`scores`, `weights` and `centered` are [rows]; a group's number is its place in `Groups.size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

Index = Sequence[Any] | np.ndarray


@dataclass(frozen=True)
class Groups:
    """Assigns rows to groups; the samples of one prompt are a group."""

    of_row: Tensor
    """[rows], int64: the number of each row's group."""
    size: Tensor
    """[groups]: the number of rows of each group, in the scores' dtype."""

    @classmethod
    def of(cls, index: Index, scores: Tensor) -> Groups:
        """Group the rows with equal values of `index`."""
        numbers: dict[Any, int] = {}
        of_row = [numbers.setdefault(uid, len(numbers)) for uid in index]
        group = torch.tensor(of_row, dtype=torch.int64, device=scores.device)
        return cls(group, torch.bincount(group).to(scores.dtype))

    def sum(self, scores: Tensor) -> Tensor:
        """Return the sum of each group's scores, [groups]."""
        return torch.zeros_like(self.size).index_add_(0, self.of_row, scores)

    def size_of_row(self) -> Tensor:
        """Return the size of each row's group, [rows]."""
        return self.size[self.of_row]

    def lowest(self, scores: Tensor) -> Tensor:
        """Return the lowest score in each row's group, [rows]."""
        lowest = torch.zeros_like(self.size)
        lowest.scatter_reduce_(0, self.of_row, scores, "amin", include_self=False)
        return lowest[self.of_row]

    def centered(self, scores: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the scores minus their group's mean, in which `weights` can weight the rows.

        The score of a group of one stays unchanged. Equal scores give exactly zero, because the
        mean is computed from distances to the group's lowest score.
        """
        shifted = scores - self.lowest(scores)
        if weights is None:
            mean = self.sum(shifted) / self.size
        else:
            total = self.sum(weights)
            mean = self.sum(shifted * weights) / torch.where(total > 0, total, 1)
        return torch.where(self.size_of_row() > 1, shifted - mean[self.of_row], scores)

    def std(self, centered: Tensor) -> Tensor:
        """Return the standard deviation (n - 1) in each row's group, [rows], of centered scores."""
        variance = self.sum(centered.square()) / (self.size - 1).clamp(min=1)
        return variance.sqrt()[self.of_row]

    def normalized(self, centered: Tensor, epsilon: float) -> Tensor:
        """Return centered scores divided by their group's standard deviation.

        The score of a group of one stays unchanged.
        """
        divided = centered / (self.std(centered) + epsilon)
        return torch.where(self.size_of_row() > 1, divided, centered)


def sequence_scores(token_level_rewards: Tensor) -> Tensor:
    """Return one score per row, [rows]: the sum of its rewards [rows, R]."""
    return token_level_rewards.sum(dim=-1)


def on_tokens(scores: Tensor, response_mask: Tensor) -> Tensor:
    """Copy each row's score to all of its tokens: [rows] -> [rows, R], zero outside the mask."""
    return torch.where(response_mask.bool(), scores.unsqueeze(-1), 0)
