"""On-policy RL with the optimal baseline (OPO): longer samples weigh more in the baseline.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, kl_belongs_in_loss


@ADVANTAGE_ESTIMATORS.register("opo")
@kl_belongs_in_loss
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, in which samples are weighted by length.

    This baseline has the least variance if gradients grow with length.

    Watch: If `actor/ppo_kl` is not 0, set `actor.ppo_mini_batch_size` to the whole batch and
    `actor.ppo_epochs` to 1.

    Source: arXiv 2505.23585
    """
    scores = scores_of(token_level_rewards)
    lengths = torch.count_nonzero(response_mask, dim=-1).to(scores.dtype)
    centered = Groups.of(index, scores).centered(scores, weights=lengths)
    advantages = on_tokens(centered, response_mask)
    return advantages, advantages
