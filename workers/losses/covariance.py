"""How an update at each token would move the entropy: covariance of log-prob and advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import masked_sum

BLOCK = 64
"""Rows that are multiplied at once."""


@torch.no_grad()
def token_covariance(advantages: Tensor, log_prob: Tensor, inside: Tensor) -> Tensor:
    """(A - its mean) times (log p - its mean), both over the call's tokens; -inf outside the mask.

    Their mean is the covariance, which says how fast the entropy falls (arXiv 2505.22617).
    """
    mean = _mean_inside(log_prob, inside)
    product = advantages - _mean_inside(advantages, inside)
    parts = (column.split(BLOCK) for column in (product, log_prob, inside))
    for of_product, of_log_prob, of_mask in zip(*parts, strict=True):
        of_product.mul_(of_log_prob - mean).masked_fill_(~of_mask, -torch.inf)
    return product


def _mean_inside(values: Tensor, inside: Tensor) -> Tensor:
    """The mean inside the mask, without a copy of the column: block by block."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for of_values, of_mask in zip(values.split(BLOCK), inside.split(BLOCK), strict=True):
        total += masked_sum(of_values, of_mask)
    return (total / torch.count_nonzero(inside).clamp(min=1)).to(values.dtype)
