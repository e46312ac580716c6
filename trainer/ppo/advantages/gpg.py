"""Group policy gradient (GPG): centered scores, scaled up if many scores are zero.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, kl_belongs_in_loss


@ADVANTAGE_ESTIMATORS.register("gpg")
@kl_belongs_in_loss
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, times `samples / samples with a nonzero score`.

    The factor is verl's; the paper leaves out groups of equal scores instead. A group of one sample
    keeps its raw score, times the factor.

    Watch: If `critic/advantages/max` jumps, few scores may be nonzero: lower the learning rate, or
    use `grpo`.

    Source: arXiv 2504.02546
    """
    scores = scores_of(token_level_rewards)
    centered = Groups.of(index, scores).centered(scores)
    scale = len(scores) / torch.count_nonzero(scores).clamp(min=1)
    advantages = on_tokens(centered * scale.to(scores.dtype), response_mask)
    return advantages, advantages
