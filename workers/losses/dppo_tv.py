"""DPPO-Binary-TV: a token has no gradient if updates have moved its probability too far.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

from torch import Tensor

from workers.config import ActorConfig
from workers.losses.importance_ratio import CLIP_RANGE, losses_in_trust_region
from workers.losses.registry import POLICY_LOSSES
from workers.losses.token_loss import token_loss


@POLICY_LOSSES.register("dppo_tv")
@token_loss(keys_read=(*CLIP_RANGE, "clip_ratio_c"), holds_weights=True)
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
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
    return losses_in_trust_region(moved, old_log_prob, log_prob, advantages, mask, config)
