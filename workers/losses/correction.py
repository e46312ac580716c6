"""Importance weights for tokens that another engine drew, under its own probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from verl_like.errors import ConfigError
from workers.losses.importance_ratio import LARGEST_LOG_RATIO


@torch.no_grad()
def compute_rollout_importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    *,
    rollout_is: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float = 2.0,
) -> Tensor:
    """The trainer's probability over the rollout engine's, bounded, without gradient.

    It is `rollout_is_weights` of the policy losses and makes the update a decoupled PPO: the clip
    compares with the trainer's old policy, the weight with the one that sampled. One weight a
    token, or one a sequence (the product over it). `truncate` caps weights at the threshold c;
    `mask` keeps those within [1/c, c] and gives the others zero. Zero outside the mask.

    A token whose weight is zero stays in the loss's denominators: it adds nothing, and the tokens
    that are kept weigh what they would weigh beside it. Without it a mini-batch in which most
    tokens are rejected would take a step as large as one in which none is.

    Source: decoupled PPO, arXiv 2110.00641; truncation: Ionides, "Truncated importance sampling",
    JCGS 17, 2008
    """
    _check(rollout_is, rollout_is_mode, rollout_is_threshold)
    inside = response_mask.bool()
    log_ratio = torch.where(inside, old_log_prob - rollout_log_prob, 0)
    if rollout_is == "sequence":
        log_ratio = log_ratio.sum(dim=-1, keepdim=True).expand_as(log_ratio)
    weights = log_ratio.clamp(min=-LARGEST_LOG_RATIO, max=LARGEST_LOG_RATIO).exp()

    if rollout_is_mode == "truncate":
        weights = weights.clamp(max=rollout_is_threshold)
    else:
        kept = (weights <= rollout_is_threshold) & (weights >= 1.0 / rollout_is_threshold)
        weights = torch.where(kept, weights, 0)
    return torch.where(inside, weights, 0)


def _check(rollout_is: str, rollout_is_mode: str, rollout_is_threshold: float) -> None:
    if rollout_is not in ("token", "sequence") or rollout_is_mode not in ("truncate", "mask"):
        raise ConfigError(
            f"rollout_is={rollout_is!r} with rollout_is_mode={rollout_is_mode!r}: "
            "the first is token or sequence, the second truncate or mask."
        )
    if rollout_is_threshold < 1.0:
        raise ConfigError(
            f"rollout_is_threshold is {rollout_is_threshold}; equal policies weigh 1: take 1 or "
            "more."
        )
