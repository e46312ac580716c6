"""The policy gradient of tokens inside a trust region, shared by the losses of DPPO."""

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
    """Return the token losses, and per-token values of which metrics are the means.

    The loss is -A log p times the ratio, cut at `clip_ratio_c` and without gradient. `moved` is
    negative where the probability fell. Tokens with a positive advantage drop out if they `moved`
    by more than the upper clip range. Other tokens drop out if they fell by more than the lower
    one.
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
