"""Covariance of log-prob and advantage per token: how an update at a token changes the entropy."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import masked_sum

BLOCK = 64
"""Rows that are processed at a time."""


@torch.no_grad()
def token_covariance(advantages: Tensor, log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return (A - mean A) (log p - mean log p), [rows, R], with means over the tokens of the call.

    `mask` is a bool; tokens outside it get -inf. The mean over the other tokens is the covariance,
    which determines how fast the entropy falls (arXiv 2505.22617).
    """
    mean = _mean_inside(log_prob, mask)
    product = advantages - _mean_inside(advantages, mask)
    parts = (column.split(BLOCK) for column in (product, log_prob, mask))
    for of_product, of_log_prob, of_mask in zip(*parts, strict=True):
        of_product.mul_(of_log_prob - mean).masked_fill_(~of_mask, -torch.inf)
    return product


def _mean_inside(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean inside the mask. It works in blocks, so it does not copy the column."""
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    for of_values, of_mask in zip(values.split(BLOCK), mask.split(BLOCK), strict=True):
        total += masked_sum(of_values, of_mask)
    return (total / torch.count_nonzero(mask).clamp(min=1)).to(values.dtype)
