"""CISPO clips importance weights, but never drops the gradient of a token.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.importance_ratio import CLIP_RANGE, clip_range, log_ratio
from workers.losses.registry import POLICY_LOSSES
from workers.losses.token_loss import token_loss


@POLICY_LOSSES.register("cispo")
@token_loss(keys_read=CLIP_RANGE, clips_weights=True, holds_weights=True)
def compute_policy_loss_cispo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient, weighted by the clipped ratio: `-A * sg(clip(r)) * log p`.

    Unlike with PPO's clipping, every token keeps a gradient.

    Watch: If `actor/pg_clipfrac`, the fraction of clipped weights, is above a few percent, use
    fewer mini-batches per step.

    Source: MiniMax-M1 (CISPO), arXiv 2506.13585
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    ratio = log_r.detach().exp()
    weight = ratio.clamp(*clip_range(config))
    losses = -advantages * weight * zero_outside(log_prob, mask)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": weight != ratio,
        "actor/pg_clipfrac_lower": torch.zeros_like(mask),
    }
    return losses, per_token
