"""The policy gradient of the tokens that may still move: what the losses of DPPO share."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_policy_loss, with_slope
from workers.losses.importance_ratio import log_ratio


def trust_region_loss(
    too_far_up: Tensor,
    too_far_down: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    largest_ratio: float,
    rollout_is_weights: Tensor | None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p times the ratio, cut at `largest_ratio` and without gradient, where A may act.

    A positive advantage does not act on tokens that are `too_far_up`, any other one not on those
    that are `too_far_down`.
    """
    inside = response_mask.bool()
    advantages = zero_outside(advantages, inside)
    log_r = log_ratio(log_prob.detach(), old_log_prob, inside)
    ratio = log_r.exp()

    rises = advantages > 0
    dropped = ((rises & too_far_up) | (~rises & too_far_down)) & inside
    weight = zero_outside(ratio.clamp(max=largest_ratio), ~dropped).mul_(advantages).neg_()
    losses = with_slope(weight * zero_outside(log_prob.detach(), inside), weight, log_prob)

    per_token = {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": dropped,
        "actor/pg_clipfrac_lower": (ratio > largest_ratio) & ~dropped,
    }
    return agg_policy_loss(
        losses, per_token, response_mask, loss_agg_mode, rollout_is_weights, **denominators
    )
