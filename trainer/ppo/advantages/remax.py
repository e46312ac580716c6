"""ReMax: the baseline is the score of the prompt's greedy response.

Tensors are [rows, R], except `reward_baselines` [rows]. Advantages and returns are zero outside
the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import on_tokens
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import returns_of


@ADVANTAGE_ESTIMATORS.register("remax")
@torch.no_grad()
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """The token's undiscounted return minus the score of the prompt's greedy response.

    `reward_baselines` has the shape [rows].

    Watch: If `critic/advantages/mean` stays below 0, lower `rollout.temperature`.

    Source: arXiv 2310.10505
    """
    returns = returns_of(token_level_rewards, response_mask, gamma=1.0)
    return returns - on_tokens(reward_baselines, response_mask), returns
