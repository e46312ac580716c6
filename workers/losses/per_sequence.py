"""Losses with one importance ratio per sequence: GSPO, and GMPO, which clips each token's ratio.

All tensors are [rows, R]; `workers.losses.registry` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.tensor_ops import masked_mean, zero_outside
from workers.config import ActorConfig
from workers.losses.registry import (
    CLIP_RANGE,
    LARGEST_LOG_RATIO,
    POLICY_LOSSES,
    clip_range,
    clip_widths,
    log_ratio,
    token_loss,
)


@POLICY_LOSSES.register("geo_mean", "gmpo")
@token_loss("seq-mean-token-mean", keys_read=CLIP_RANGE, one_ratio_per_sequence=True)
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

    rises, sign = advantages > 0, advantages.sign()
    limit = torch.where(rises, log_r.new_tensor(high), log_r.new_tensor(low))
    limited = sign * torch.minimum(sign * log_r, limit)
    lengths = mask.sum(dim=-1, keepdim=True).clamp(min=1)
    ratio = (limited.sum(dim=-1, keepdim=True) / lengths).exp()
    losses = (-advantages.sum(dim=-1, keepdim=True) / lengths * ratio).expand_as(mask)

    is_clipped = sign * log_r > limit
    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": is_clipped & rises,
        "actor/pg_clipfrac_lower": is_clipped & ~rises,
    }
    return losses, per_token


@POLICY_LOSSES.register("gspo", "luspo")
@token_loss(
    "seq-mean-token-mean",
    keys_read=CLIP_RANGE,
    one_ratio_per_sequence=True,
    clips_sequences=True,
    holds_weights=True,
    longer_count_more=("luspo",),
)
def compute_policy_loss_gspo(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped loss with the ratio of the sequence: the geometric mean of its token ratios.

    This is the paper's token-level form: the value is that of the sequence ratio, and each token
    contributes its own gradient. The paper uses `seq-mean-token-mean` and clips at 3e-4 and 4e-4.
    LUSPO, registered as `luspo`, is the same loss with `loss_agg_mode=seq-mean-token-sum`, which
    weights each sequence by its number of tokens. Set this key as well.

    Watch: `actor/pg_clipfrac` is usually 0.1 or more. If it is 0, the clip range is too wide for
    sequence ratios: set `clip_ratio_low` and `clip_ratio_high`.

    Source: GSPO, arXiv 2507.18071, section 4.3; LUSPO, arXiv 2602.05261
    """
    log_r = log_ratio(log_prob.detach(), old_log_prob, mask)
    # only the mean is clamped, so a token that moved far counts fully
    mean = masked_mean((log_prob - old_log_prob).detach(), mask, axis=-1).unsqueeze(-1)
    of_sequence = mean.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO).exp()
    ratio = of_sequence * zero_outside(log_prob - log_prob.detach(), mask).exp()

    free = -advantages * ratio
    clipped = -advantages * ratio.clamp(*clip_range(config))
    losses = torch.maximum(free, clipped)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": clipped > free,
        "actor/pg_clipfrac_lower": torch.zeros_like(mask),
    }
    return losses, per_token
