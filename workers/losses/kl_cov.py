"""KL-Cov: the policy gradient, with a KL penalty on tokens that would reduce the entropy most.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.covariance import token_covariance
from workers.losses.importance_ratio import log_ratio
from workers.losses.registry import POLICY_LOSSES, NotNegative, Share
from workers.losses.token_loss import token_loss


@torch.no_grad()
def _choose_tokens(
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    generator: torch.Generator | None = None,
    config: ActorConfig | None = None,
    *,
    kl_cov_ratio: Share = 2e-4,
) -> Tensor:
    """Choose the tokens with a KL penalty: those of the mini-batch with the highest covariance."""
    mask = response_mask.bool()
    covariance = token_covariance(advantages, old_log_prob, mask)

    flat = covariance.flatten()
    count = max(int(kl_cov_ratio * torch.count_nonzero(mask)), 1)
    chosen = torch.zeros_like(flat, dtype=torch.bool)
    chosen[flat.topk(min(count, len(flat))).indices] = True
    return chosen.view_as(mask) & mask


@POLICY_LOSSES.register("kl_cov")
@token_loss(keys_read=(), choose_tokens=_choose_tokens)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    chosen: Tensor,
    *,
    ppo_kl_coef: NotNegative = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A KL penalty on the tokens with the highest covariance of A and log p: `-A * r + KL`.

    The KL is `ppo_kl_coef * |log r|`. It applies to a fraction `kl_cov_ratio` of the tokens in the
    mini-batch, at least one. The covariance is computed under the old policy.

    Watch: If `actor/ppo_kl`, here the mean of |log r|, grows within a step, use fewer mini-batches,
    because nothing is clipped. `actor/entropy` should stop falling.

    Source: arXiv 2505.22617
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    distance = log_r.abs()
    kl = ppo_kl_coef * zero_outside(distance, chosen)
    losses = kl - advantages * log_r.exp()

    return losses, {"actor/ppo_kl": distance, "actor/kl_cov_frac": chosen}
