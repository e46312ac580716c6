"""REINFORCE leave-one-out (RLOO): the baseline is the mean of the prompt's other samples.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS


@ADVANTAGE_ESTIMATORS.register("rloo", "rloo_vectorized")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the mean score of the group's other samples.

    Watch: If `actor/grad_norm` is always above `actor.grad_clip`, scale the scores, or bound them
    (`algorithm.score_clip`).

    Source: arXiv 2402.14740
    """
    scores = scores_of(token_level_rewards)
    groups = Groups.of(index, scores)
    from_mean_to_others = groups.size / (groups.size - 1).clamp(min=1)
    advantages = groups.centered(scores) * from_mean_to_others[groups.of_row]
    advantages = on_tokens(advantages, response_mask)
    return advantages, advantages
