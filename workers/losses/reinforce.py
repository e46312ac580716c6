"""REINFORCE: the plain policy gradient.

All tensors are [rows, R]; `workers.losses.token_loss` explains the shapes and the symbols.
"""

from __future__ import annotations

from torch import Tensor

from verl_like.tensor_ops import zero_outside
from workers.config import ActorConfig
from workers.losses.importance_ratio import log_ratio
from workers.losses.registry import POLICY_LOSSES
from workers.losses.token_loss import token_loss


@POLICY_LOSSES.register("reinforce", "gpg")
@token_loss(keys_read=(), has_ratio=False)
def compute_policy_loss_reinforce(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy gradient, without ratio or clipping: `-A * log p`.

    GPG has the same loss. With `rollout_correction.rollout_is`, the gradient of each token is
    weighted by the ratio of the trainer's to the rollout's probability, of the token or of its
    sequence. This ratio is bounded and has no gradient.

    Watch: If `actor/ppo_kl` is not about 0, later mini-batches are off-policy: set
    `actor.ppo_mini_batch_size` to the whole batch and `actor.ppo_epochs` to 1, or use `vanilla`.

    Source: Williams, Machine Learning 8, 1992; GPG, arXiv 2504.02546
    """
    losses = -advantages * zero_outside(log_prob, mask)
    per_token = {"actor/ppo_kl": -log_ratio(log_prob, old_log_prob, mask)}
    return losses, per_token
