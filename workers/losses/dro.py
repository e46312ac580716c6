"""Direct reward optimization (DRO): the policy gradient with a squared penalty, no clip."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_policy_loss
from workers.losses.blocks import in_blocks
from workers.losses.importance_ratio import ClipSettings, log_ratio
from workers.losses.registry import POLICY_LOSSES, reads


@POLICY_LOSSES.register("dro")
@reads()
@in_blocks("log_prob")
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: ClipSettings | None = None,
    rollout_is_weights: Tensor | None = None,
    dro_beta: float = 0.05,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log p plus half of 0.05 (log p - log old p) squared.

    The square pulls each token back to the old policy, however it was sampled, so old samples
    need neither ratio nor clip.

    Watch: `actor/ppo_kl` that grows while `actor/dro_penalty` stays far below `actor/pg_loss`: the
    pull is too weak for the steps. Lower the learning rate, or take fewer mini-batches.

    Source: DRO, arXiv 2405.19107, by tokens
    """
    inside = response_mask.bool()
    advantages = zero_outside(advantages, inside)
    log_r = log_ratio(log_prob, old_log_prob, inside)
    losses = 0.5 * dro_beta * log_r.square() - advantages * zero_outside(log_prob, inside)

    per_token = {"actor/ppo_kl": -log_r, "actor/dro_penalty": 0.5 * dro_beta * log_r.square()}
    return agg_policy_loss(
        losses, per_token, response_mask, loss_agg_mode, rollout_is_weights, **denominators
    )
