"""ColossalChat's advantages: a response is one action, with one reward and one value.

Tensors are [rows, R]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import is_last_inside


@ADVANTAGE_ESTIMATORS.register("coati")
@torch.no_grad()
def compute_coati_advantage(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """For every token, the response's reward minus the value at the last token.

    Advantages are not whitened. The reward is the sum of the row's token rewards: with
    `kl_penalty_per=sequence`, the score minus the KL coefficient times the mean KL. The critic
    learns this reward at every token.

    Watch: If `critic/advantages/mean` stays far from 0, raise `critic.optim.lr`, or set
    `trainer.critic_warmup`.

    Source: ColossalChat, `NaiveExperienceMaker` of 2023
    """
    rewards = scores_of(token_level_rewards)
    last_values = values.masked_fill(~is_last_inside(response_mask), 0).sum(dim=-1)
    advantages = on_tokens(rewards - last_values, response_mask)
    return advantages, on_tokens(rewards, response_mask)
