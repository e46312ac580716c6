"""How an update at each token would move the entropy: covariance of log-prob and advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import masked_mean

BLOCK = 64
"""Rows that are multiplied at once."""


@torch.no_grad()
def token_covariance(advantages: Tensor, log_prob: Tensor, inside: Tensor) -> Tensor:
    """(A - its mean) times (log p - its mean), both over the call's tokens; -inf outside the mask.

    Their mean is the covariance, which says how fast the entropy falls (arXiv 2505.22617).
    """
    product = advantages - masked_mean(advantages, inside)
    mean = masked_mean(log_prob, inside)
    # block by block, so that one column is all that it takes
    for of_product, of_log_prob in zip(product.split(BLOCK), log_prob.split(BLOCK), strict=True):
        of_product.mul_(of_log_prob - mean)
    return product.masked_fill_(~inside, -torch.inf)
