"""REINFORCE: the plain policy gradient."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_policy_loss
from workers.losses.blocks import in_blocks
from workers.losses.importance_ratio import ClipSettings, log_ratio
from workers.losses.registry import POLICY_LOSSES, reads, without_ratio


@POLICY_LOSSES.register("reinforce", "gpg")
@reads()
@without_ratio
@in_blocks("log_prob")
def compute_policy_loss_reinforce(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ClipSettings | None = None,
    rollout_is_weights: Tensor | None = None,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p, with no ratio and nothing to clip.

    GPG's loss is the same, under its own name. With `rollout_correction.rollout_is` every token's
    gradient is weighed by the trainer's probability over the rollout's, bounded and held fast:
    REINFORCE with importance weights.

    Watch: `actor/ppo_kl` other than 0: later mini-batches train on samples that are no longer the
    policy's own, and nothing corrects it. Let `actor.ppo_mini_batch_size` be the whole batch, or
    take `vanilla`.

    Source: Williams, Machine Learning 8, 1992; GPG, arXiv 2504.02546
    """
    inside = response_mask.bool()
    losses = -zero_outside(advantages, inside) * zero_outside(log_prob, inside)
    per_token = {"actor/ppo_kl": -log_ratio(log_prob, old_log_prob, inside)}
    return agg_policy_loss(
        losses, per_token, response_mask, loss_agg_mode, rollout_is_weights, **denominators
    )
