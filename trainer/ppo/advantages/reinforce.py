"""REINFORCE with other baselines: REINFORCE++ (whitening), ReMax (greedy), ColossalChat (critic).

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, sequence_scores
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import discounted_returns, is_last_inside, whiten_


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """The token's discounted return, whitened.

    Watch: If `critic/score/mean` stays flat while `actor/grad_norm` does not fall, use
    `reinforce_plus_plus_baseline` with `rollout.n` above 1.

    Source: arXiv 2501.03262
    """
    returns = discounted_returns(token_level_rewards, response_mask, gamma)
    advantages = returns.clone()
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, returns


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
    scores = sequence_scores(token_level_rewards)
    centered = Groups.of(index, scores).centered(scores)
    advantages = on_tokens(centered, response_mask)
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, advantages


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
    returns = discounted_returns(token_level_rewards, response_mask, gamma=1.0)
    return returns - on_tokens(reward_baselines, response_mask), returns


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
    rewards = sequence_scores(token_level_rewards)
    last_values = values.masked_fill(~is_last_inside(response_mask), 0).sum(dim=-1)
    advantages = on_tokens(rewards - last_values, response_mask)
    return advantages, on_tokens(rewards, response_mask)
