"""REINFORCE++ with a baseline: the group's mean is subtracted, then the batch is whitened.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.whiten import whiten_


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus_baseline")
@torch.no_grad()
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, whitened.

    Watch: If `critic/advantages/max`, in standard deviations, is large, most groups have equal
    scores: set `algorithm.filter_groups.enable`.

    Source: arXiv 2501.03262
    """
    scores = scores_of(token_level_rewards)
    centered = Groups.of(index, scores).centered(scores)
    advantages = on_tokens(centered, response_mask)
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, advantages
