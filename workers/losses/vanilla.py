"""PPO's clipped surrogate, with two clip ranges and a dual clip.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.aggregate import with_slope
from workers.losses.importance_ratio import CLIP_RANGE, clip_range, log_ratio
from workers.losses.registry import POLICY_LOSSES
from workers.losses.token_loss import token_loss


@POLICY_LOSSES.register("vanilla")
@token_loss(keys_read=(*CLIP_RANGE, "clip_ratio_c"))
def compute_policy_loss_vanilla(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss: `max(-A * r, -A * clip(r))`.

    `clip(r)` is within [1 - clip_ratio_low, 1 + clip_ratio_high]. For A < 0, the loss is at most
    `-A * clip_ratio_c` (dual clip).

    Watch: If `actor/pg_clipfrac` is above 0.2, or `actor/ppo_kl` grows over the run, lower the
    learning rate, or use fewer mini-batches per step. If `actor/entropy` falls to 0, raise
    `clip_ratio_high`.

    Source: PPO, arXiv 1707.06347; two ranges: DAPO, arXiv 2503.14476; dual clip: arXiv 1912.09729
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    ratio = log_r.detach().exp()

    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(*clip_range(config))
    worse = torch.maximum(free, clipped)

    # has no effect if A >= 0, because the loss is then not positive
    bound = advantages.abs() * config.clip_ratio_c
    is_clipped, is_bounded = clipped > free, worse > bound
    slope = zero_outside(free, ~(is_clipped | is_bounded))
    losses = with_slope(torch.minimum(worse, bound), slope, log_r)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": is_clipped,
        "actor/pg_clipfrac_lower": is_bounded,
    }
    return losses, per_token
