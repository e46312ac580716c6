"""Soft adaptive policy optimization (SAPO): a smooth gate instead of the clip.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.config import ActorConfig
from workers.losses.aggregate import with_slope
from workers.losses.importance_ratio import log_ratio
from workers.losses.registry import POLICY_LOSSES, Positive
from workers.losses.token_loss import token_loss


@POLICY_LOSSES.register("sapo")
@token_loss("seq-mean-token-mean", keys_read=())
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    *,
    tau_pos: Positive = 1.0,
    tau_neg: Positive = 1.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """A smooth gate instead of clipping: `-A * (4 / tau) * sigmoid(tau * (r - 1))`.

    At r = 1, its gradient equals the policy gradient; it fades as r moves away from 1. tau is
    `tau_pos` where A > 0. Elsewhere it is `tau_neg`, by default larger, so that the gradient fades
    faster for tokens whose probability is reduced. The paper uses `seq-mean-token-mean`.

    Watch: If `actor/ppo_kl` grows while `actor/grad_norm` falls, lower the learning rate, or use
    fewer mini-batches per step.

    Source: SAPO, arXiv 2511.20347
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    ratio = log_r.detach().exp()
    rises = advantages.sign().clamp_(min=0)  # 1 where A is positive
    tau = tau_pos * rises + tau_neg * (1 - rises)
    gate = torch.sigmoid((ratio - 1.0).mul_(tau))
    losses = with_slope(
        (advantages * gate).mul_(-4.0).div_(tau),
        (gate - 1.0).mul_(gate).mul_(ratio).mul_(advantages).mul_(4.0),
        log_r,
    )
    return losses, {"actor/ppo_kl": -log_r}
