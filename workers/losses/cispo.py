"""CISPO: importance weights are clipped, tokens never are."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_policy_loss
from workers.losses.blocks import in_blocks
from workers.losses.importance_ratio import ClipSettings, DefaultClip, clip_range, log_ratio
from workers.losses.registry import POLICY_LOSSES, clips_weights, reads


@POLICY_LOSSES.register("cispo")
@reads("clip_ratio", "clip_ratio_low", "clip_ratio_high")
@clips_weights
@in_blocks("log_prob")
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ClipSettings | None = None,
    rollout_is_weights: Tensor | None = None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p, times the ratio policy / old policy, clipped and without its gradient.

    No token drops out of the gradient, as PPO's clip makes them do.

    Watch: `actor/pg_clipfrac`, here the share of capped weights, above some percent: policy and old
    policy are far apart, and every token still pulls. Take fewer mini-batches a step.

    Source: MiniMax-M1 (CISPO), arXiv 2506.13585
    """
    config = config or DefaultClip()
    inside = response_mask.bool()
    log_r = log_ratio(log_prob, old_log_prob, inside)
    ratio = log_r.detach().exp()
    weight = ratio.clamp(*clip_range(config))
    losses = -zero_outside(advantages, inside) * weight * zero_outside(log_prob, inside)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": weight != ratio,
        "actor/pg_clipfrac_lower": torch.zeros_like(inside),
    }
    return agg_policy_loss(
        losses, per_token, response_mask, loss_agg_mode, rollout_is_weights, **denominators
    )
