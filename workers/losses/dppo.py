"""DPPO: a token has no gradient if updates have moved its probability too far.

The distance is the change of the probability (`dppo_tv`), or the KL from the old to the current
policy over two outcomes: this token, or any other (`dppo_kl`).

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.aggregate import with_slope
from workers.losses.importance_ratio import CLIP_RANGE, clip_widths, log_ratio
from workers.losses.registry import POLICY_LOSSES
from workers.losses.token_loss import token_loss

_SMALLEST = 1e-8
"""Lower bound for the probability of "another token", so that the KL is always finite."""


@POLICY_LOSSES.register("dppo_kl")
@token_loss(keys_read=(*CLIP_RANGE, "clip_ratio_c"), holds_weights=True)
def compute_policy_loss_dppo_kl(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient for tokens with a small KL: `-A * sg(min(r, clip_ratio_c)) * log p`.

    The KL is KL(old policy || current policy) over two outcomes: this token or another one. A token
    with A > 0 is left out if p rose and the KL is above `clip_ratio_high`. Any other token is left
    out if p fell and the KL is above `clip_ratio_low`.

    Watch: If `actor/pg_clipfrac`, the fraction of tokens left out, is 0, lower `clip_ratio_low` and
    `clip_ratio_high`. If `actor/pg_clipfrac_lower`, the fraction of tokens whose ratio is
    truncated at `clip_ratio_c`, is more than a few percent, raise `clip_ratio_c`.

    Source: DPPO, arXiv 2602.04879
    """
    moved = _signed_binary_kl(old_log_prob, log_prob.detach())
    return _losses_in_trust_region(moved, old_log_prob, log_prob, advantages, mask, config)


@POLICY_LOSSES.register("dppo_tv")
@token_loss(keys_read=(*CLIP_RANGE, "clip_ratio_c"), holds_weights=True)
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient for tokens whose p moved little: `-A * sg(min(r, clip_ratio_c)) * log p`.

    A token with A > 0 is left out if p is more than `clip_ratio_high` above p_old. Any other token
    is left out if p is more than `clip_ratio_low` below p_old. Here these keys bound the change of
    the probability, not the ratio. The paper sets `clip_ratio_c` to 20.

    Watch: If `actor/pg_clipfrac`, the fraction of tokens left out, is 0, lower `clip_ratio_low` and
    `clip_ratio_high`. If `actor/pg_clipfrac_lower`, the fraction of tokens whose ratio is
    truncated at `clip_ratio_c`, is more than a few percent, raise `clip_ratio_c`.

    Source: DPPO, arXiv 2602.04879
    """
    moved = log_prob.detach().exp() - old_log_prob.exp()
    return _losses_in_trust_region(moved, old_log_prob, log_prob, advantages, mask, config)


def _signed_binary_kl(old_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    """Return the divergence, with a negative sign where the log-prob fell."""
    rose = log_prob - old_log_prob
    old = old_log_prob.exp()
    old_others, new_others = 1 - old, log_prob.exp().neg_().add_(1).clamp_(min=_SMALLEST)
    of_others = old_others.clamp(min=_SMALLEST).div_(new_others).log_().mul_(old_others)
    return of_others.sub_(old.mul_(rose)).clamp_(min=0).copysign_(rose)


def _losses_in_trust_region(
    moved: Tensor,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the token losses, and per-token values whose means are metrics.

    The loss is -A log p times the ratio; the ratio is at most `clip_ratio_c` and has no gradient.
    `moved` is negative where the probability fell. A token with a positive advantage drops out if
    its `moved` exceeds `clip_ratio_high`; another token, if its `moved` is below `-clip_ratio_low`.
    """
    low, high = clip_widths(config)
    log_r = log_ratio(log_prob.detach(), old_log_prob, mask)
    ratio = log_r.exp()

    rises = advantages > 0
    dropped = ((rises & (moved > high)) | (~rises & (moved < -low))) & mask
    weight = zero_outside(ratio.clamp(max=config.clip_ratio_c), ~dropped).mul_(advantages).neg_()
    losses = with_slope(weight * zero_outside(log_prob.detach(), mask), weight, log_prob)

    return losses, {
        "actor/ppo_kl": -log_r,
        "actor/pg_clipfrac": dropped,
        "actor/pg_clipfrac_lower": (ratio > config.clip_ratio_c) & ~dropped,
    }
