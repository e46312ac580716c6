"""KL-Cov: the policy gradient, with a KL for tokens that would cost the most entropy."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from workers.losses.aggregate import Denominators, agg_policy_loss
from workers.losses.covariance import token_covariance
from workers.losses.importance_ratio import ClipSettings, log_ratio
from workers.losses.registry import POLICY_LOSSES, reads


@POLICY_LOSSES.register("kl_cov")
@reads()
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ClipSettings | None = None,
    rollout_is_weights: Tensor | None = None,
    kl_cov_ratio: float = 2e-4,
    ppo_kl_coef: float = 1.0,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A r, with r = policy / old policy, plus |log r| for tokens of the highest covariance.

    The covariance is that of A and log p; 2 in 10000 tokens of the micro-batch have the highest, at
    least one. Means are the micro-batch's too, so unlike other losses this one depends on its size.

    Watch: `actor/entropy`, which it is to hold up, and `actor/kl_cov_frac`: above 2e-4
    micro-batches are below 5000 tokens, and the one token that each must choose makes the penalty
    stronger.

    Source: arXiv 2505.22617
    """
    inside = response_mask.bool()
    advantages = torch.where(inside, advantages, 0)
    log_r = log_ratio(log_prob, old_log_prob, inside)

    covariance = token_covariance(advantages, log_prob, inside)
    chosen = inside & _highest(covariance, max(int(kl_cov_ratio * inside.sum()), 1))
    penalty = torch.where(chosen, ppo_kl_coef * log_r.abs(), 0)

    return agg_policy_loss(
        -advantages * log_r.exp() + penalty,
        {"actor/ppo_kl": -log_r, "actor/kl_cov_frac": chosen},
        response_mask,
        loss_agg_mode,
        rollout_is_weights,
        **denominators,
    )


def _highest(values: Tensor, count: int) -> Tensor:
    """Where the `count` highest values are."""
    flat = values.flatten()
    highest = torch.zeros_like(flat, dtype=torch.bool)
    highest[flat.topk(min(count, len(flat))).indices] = True
    return highest.view_as(values)
