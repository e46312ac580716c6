"""Direct reward optimization (DRO): the policy gradient with a quadratic penalty, no clipping.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.importance_ratio import log_ratio
from workers.losses.registry import POLICY_LOSSES, Positive
from workers.losses.token_loss import token_loss


@POLICY_LOSSES.register("dro")
@token_loss(keys_read=())
def compute_policy_loss_dro(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: ActorConfig,
    *,
    dro_beta: Positive = 0.05,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient with a quadratic penalty: `-A * log p + dro_beta / 2 * (log r)^2`.

    Instead of a ratio or clipping, the penalty keeps each log-prob near that of the old policy.

    Watch: If `actor/ppo_kl` grows while `actor/dro_penalty` stays far below `actor/pg_loss`, raise
    `dro_beta`, lower the learning rate, or use fewer mini-batches.

    Source: DRO, arXiv 2405.19107, applied per token
    """
    log_r = log_ratio(log_prob, old_log_prob, mask)
    penalty = 0.5 * dro_beta * log_r.square()
    losses = penalty - advantages * zero_outside(log_prob, mask)
    return losses, {"actor/ppo_kl": -log_r, "actor/dro_penalty": penalty}
