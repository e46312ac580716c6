"""GRPO with the group's mean, but the standard deviation of the whole batch.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, kl_belongs_in_loss


@ADVANTAGE_ESTIMATORS.register("grpo_batch_std")
@kl_belongs_in_loss
@torch.no_grad()
def compute_grpo_batch_std_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, divided by the standard deviation of the batch's scores.

    The small differences in a group of nearly equal scores are not amplified.

    Watch: If `critic/advantages/min` sinks while the score nears its limit, a few bad samples
    dominate: use harder prompts.

    Source: Lite PPO, arXiv 2508.08221, section 4
    """
    scores = scores_of(token_level_rewards)
    groups = Groups.of(index, scores)
    centered = groups.centered(scores)

    from_mean = scores - scores.mean()
    variance = from_mean.square().sum() / max(len(scores) - 1, 1)
    normalized = centered / (variance.sqrt() + epsilon)
    advantages = torch.where(groups.size_of_row() > 1, normalized, centered)
    advantages = on_tokens(advantages, response_mask)
    return advantages, advantages
