"""How an update at each token would move the entropy: covariance of log-prob and advantage."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import masked_mean


@torch.no_grad()
def token_covariance(advantages: Tensor, log_prob: Tensor, inside: Tensor) -> Tensor:
    """(A - its mean) times (log p - its mean), both over the call's tokens; -inf outside the mask.

    Their mean is the covariance, which says how fast the entropy falls (arXiv 2505.22617).
    """
    product = advantages - masked_mean(advantages, inside)
    product.mul_(log_prob - masked_mean(log_prob, inside))
    return product.masked_fill_(~inside, -torch.inf)
