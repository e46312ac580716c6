"""DPPO-Binary-TV: tokens stop learning where their probability has moved too far."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from workers.losses.aggregate import Denominators, agg_policy_loss
from workers.losses.blocks import in_blocks
from workers.losses.importance_ratio import ClipSettings, DefaultClip
from workers.losses.registry import POLICY_LOSSES, reads
from workers.losses.trust_region import losses_in_trust_region


@POLICY_LOSSES.register("dppo_tv")
@reads("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
@in_blocks("log_prob")
def compute_policy_loss_dppo_tv(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ClipSettings | None = None,
    rollout_is_weights: Tensor | None = None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p times the ratio, cut at `clip_ratio_c` and without gradient, within a trust region.

    A token with A > 0 drops out once its probability is more than `clip_ratio_high` above the old
    one, any other once it is more than `clip_ratio_low` below: the clip keys bound probabilities
    here, not ratios, so rare tokens may move by large ratios. The paper cuts the ratio at 20.

    Watch: `actor/pg_clipfrac`, the share of dropped tokens: at 0 the bound is never reached, so
    lower `clip_ratio_low` and `clip_ratio_high`. `actor/pg_clipfrac_lower`, the share of cut
    ratios, above some percent: raise `clip_ratio_c`.

    Source: DPPO, arXiv 2602.04879
    """
    moved = log_prob.detach().exp() - old_log_prob.exp()

    losses, per_token = losses_in_trust_region(
        moved, old_log_prob, log_prob, advantages, response_mask, config or DefaultClip()
    )
    return agg_policy_loss(
        losses, per_token, response_mask, loss_agg_mode, rollout_is_weights, **denominators
    )
