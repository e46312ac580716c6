"""Soft adaptive policy optimization (SAPO): a smooth gate in the place of the clip."""

from __future__ import annotations

from typing import Unpack

import torch
from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.losses.aggregate import Denominators, agg_policy_loss, with_slope
from workers.losses.blocks import in_blocks
from workers.losses.importance_ratio import ClipSettings, log_ratio
from workers.losses.registry import POLICY_LOSSES, reads


@POLICY_LOSSES.register("sapo")
@reads()
@in_blocks("log_prob")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: ClipSettings | None = None,
    rollout_is_weights: Tensor | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    **denominators: Unpack[Denominators],
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A times sigmoid(tau (r - 1)) 4 / tau, with r = policy / old policy.

    Its gradient is the policy gradient at r = 1 and fades on both sides. tau is 1 where A is
    positive and 1.05 elsewhere, so that tokens pushed down fade faster. The paper aggregates by
    seq-mean-token-mean.

    Watch: `actor/ppo_kl` that grows while `actor/grad_norm` falls: the gate is nearly shut for many
    tokens. Lower the learning rate, or take fewer mini-batches a step; there is no clip fraction.

    Source: SAPO, arXiv 2511.20347
    """
    inside = response_mask.bool()
    advantages = zero_outside(advantages, inside)
    log_r = log_ratio(log_prob, old_log_prob, inside)
    ratio = log_r.detach().exp()
    rises = advantages.sign().clamp_(min=0)  # 1 where A is positive
    tau = (rises * tau_pos).add_(1 - rises, alpha=tau_neg)
    gate = torch.sigmoid((ratio - 1.0).mul_(tau))
    losses = with_slope(
        (advantages * gate).mul_(-4.0).div_(tau),
        (gate - 1.0).mul_(gate).mul_(ratio).mul_(advantages).mul_(4.0),
        log_r,
    )

    return agg_policy_loss(
        losses,
        {"actor/ppo_kl": -log_r},
        response_mask,
        loss_agg_mode,
        rollout_is_weights,
        **denominators,
    )
