"""Geometric-mean policy optimization (GMPO): clipped by token, averaged in the exponent."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_policy_loss, with_slope
from workers.losses.blocks import in_blocks
from workers.losses.importance_ratio import ClipSettings, DefaultClip, log_ratio, resolve_clip
from workers.losses.registry import POLICY_LOSSES, one_ratio_a_sequence, reads


@POLICY_LOSSES.register("geo_mean")
@reads("clip_ratio", "clip_ratio_low", "clip_ratio_high")
@one_ratio_a_sequence(is_clipped=False)
@in_blocks("log_prob")
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ClipSettings | None = None,
    rollout_is_weights: Tensor | None = None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A times the geometric mean of the sequence's token ratios, each clipped on its bad side.

    A is the mean of the sequence's advantages. A token's log-ratio is at most clip_ratio_high where
    its advantage is positive, and at least -clip_ratio_low where it is negative. Every token has
    its sequence's loss: seq-mean-token-mean gives the paper's mean over sequences, clipped at 0.4.

    Watch: `actor/pg_clipfrac` and `actor/pg_clipfrac_lower`, tokens clipped upwards and downwards:
    above some percent the mean is one of clipped ratios. Lower the learning rate, or take fewer
    mini-batches a step.

    Source: GMPO, arXiv 2507.20673
    """
    config = config or DefaultClip()
    low, high = resolve_clip(config.clip_ratio, config.clip_ratio_low, config.clip_ratio_high)
    inside = response_mask.bool()
    advantages = zero_outside(advantages, inside)
    log_r = log_ratio(log_prob, old_log_prob, inside)

    sign = advantages.sign()
    limit = (sign * ((high - low) / 2)).add_((high + low) / 2)  # high where A > 0, low where A < 0
    towards = log_r.detach() * sign
    is_clipped, rises = towards > limit, advantages > 0
    slope = zero_outside(sign.square(), ~is_clipped)  # of a token with A = 0 it is zero
    limited = with_slope(torch.minimum(towards, limit).mul_(sign), slope, log_r)
    lengths = inside.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = (limited.sum(dim=-1, keepdim=True) / lengths).exp()
    losses = (-advantages.sum(dim=-1, keepdim=True) / lengths * ratio).expand_as(inside)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": is_clipped & rises,
        "actor/pg_clipfrac_lower": is_clipped & ~rises,
    }
    return agg_policy_loss(
        losses, per_token, response_mask, loss_agg_mode, rollout_is_weights, **denominators
    )
