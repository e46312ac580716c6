"""The clipped surrogate in verl's older form: for code that calls it with four clip arguments."""

from __future__ import annotations

from torch import Tensor

from workers.losses.importance_ratio import DefaultClip, resolve_clip
from workers.losses.vanilla import compute_policy_loss_vanilla


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss `vanilla` by its clip ranges: (pg_loss, pg_clipfrac, ppo_kl, pg_clipfrac_lower)."""
    low, high = resolve_clip(cliprange, cliprange_low, cliprange_high)
    config = DefaultClip(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=clip_ratio_c)
    loss, metrics = compute_policy_loss_vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config
    )
    return (
        loss,
        metrics["actor/pg_clipfrac"],
        metrics["actor/ppo_kl"],
        metrics["actor/pg_clipfrac_lower"],
    )
