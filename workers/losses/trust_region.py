"""The policy gradient of the tokens that may still move: what the losses of DPPO share."""

from __future__ import annotations

from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.aggregate import with_slope
from workers.losses.importance_ratio import clip_widths, log_ratio


def losses_in_trust_region(
    moved: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    inside: Tensor,
    config: ActorConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses of the tokens, and what metrics are means of; `moved` is negative downwards.

    -A log p times the ratio, cut at `clip_ratio_c`, without gradient. A positive advantage does not
    act on tokens that `moved` by more than the upper clip range, any other one not on those that
    fell by more than the lower.
    """
    low, high = clip_widths(config)
    log_r = log_ratio(log_prob.detach(), old_log_prob, inside)
    ratio = log_r.exp()

    rises = advantages > 0
    dropped = ((rises & (moved > high)) | (~rises & (moved < -low))) & inside
    weight = zero_outside(ratio.clamp(max=config.clip_ratio_c), ~dropped).mul_(advantages).neg_()
    losses = with_slope(weight * zero_outside(log_prob.detach(), inside), weight, log_prob)

    return losses, {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": dropped,
        "actor/pg_clipfrac_lower": (ratio > config.clip_ratio_c) & ~dropped,
    }
