"""Geometric-mean policy optimization (GMPO): token log-ratios are clipped, then averaged.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.aggregate import with_slope
from workers.losses.importance_ratio import CLIP_RANGE, clip_widths, log_ratio
from workers.losses.registry import POLICY_LOSSES
from workers.losses.token_loss import token_loss


@POLICY_LOSSES.register("geo_mean", "gmpo")
@token_loss(
    "seq-mean-token-mean",
    keys_read=CLIP_RANGE,
    one_ratio_per_sequence=True,
)
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The geometric mean s of the sequence's ratios, each clipped on one side: `-A * s`.

    A is the mean of the sequence's advantages. log r is at most `clip_ratio_high` where the
    advantage is positive, and at least `-clip_ratio_low` where it is negative; it counts as 0 where
    the advantage is 0. Every token gets the loss of its sequence. The paper uses
    `seq-mean-token-mean` and clips at 0.4.

    Watch: If `actor/pg_clipfrac` or `actor/pg_clipfrac_lower` (fractions of tokens clipped at the
    upper or lower bound) is above a few percent, lower the learning rate, or use fewer mini-batches
    per step.

    Source: GMPO, arXiv 2507.20673
    """
    low, high = clip_widths(config)
    log_r = log_ratio(log_prob, old_log_prob, mask)

    sign = advantages.sign()
    limit = (sign * ((high - low) / 2)).add_((high + low) / 2)  # high where A > 0, low where A < 0
    towards = log_r.detach() * sign
    is_clipped, rises = towards > limit, advantages > 0
    slope = zero_outside(sign.square(), ~is_clipped)  # zero for a token with A = 0
    limited = with_slope(torch.minimum(towards, limit).mul_(sign), slope, log_r)
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = (limited.sum(dim=-1, keepdim=True) / lengths).exp()
    losses = (-advantages.sum(dim=-1, keepdim=True) / lengths * ratio).expand_as(mask)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": is_clipped & rises,
        "actor/pg_clipfrac_lower": is_clipped & ~rises,
    }
    return losses, per_token
