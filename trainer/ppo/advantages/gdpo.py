"""Group reward-decoupled normalization (GDPO): each of several rewards is normalized separately.

Tensors are [rows, R], except `named_rewards` [rows, rewards]; `index` is [rows]. Advantages and
returns are zero outside the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.whiten import whiten_


@ADVANTAGE_ESTIMATORS.register("gdpo")
@torch.no_grad()
def compute_gdpo_outcome_advantage(
    named_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    gdpo_reward_weights: Sequence[float] | None = None,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """The weighted sum of the GRPO advantages of each reward, then whitened.

    `named_rewards` has the shape [rows, rewards]. A missing reward (nan) counts as the mean of its
    group's other rewards. A group of one sample keeps its raw rewards.

    Watch: If `reward/<name>/mean` stays flat while others rise, raise the weight of that reward, or
    drop it.

    Source: arXiv 2601.05242
    """
    groups = Groups.of(index, named_rewards[:, 0])
    weights = [1.0] * named_rewards.shape[1] if gdpo_reward_weights is None else gdpo_reward_weights

    total = torch.zeros_like(named_rewards[:, 0])
    for rewards, weight in zip(named_rewards.unbind(dim=1), weights, strict=True):
        centered = groups.centered(_without_gaps(rewards, groups))
        if norm_adv_by_std_in_grpo:
            normalized = centered / (groups.std(centered) + epsilon)
            centered = torch.where(groups.size_of_row() > 1, normalized, centered)
        total.add_(centered, alpha=weight)

    advantages = on_tokens(total, response_mask)
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, advantages


def _without_gaps(rewards: Tensor, groups: Groups) -> Tensor:
    """Replace nan rewards with the mean of the group's other rewards, or with 0 if all are nan."""
    known = ~rewards.isnan()
    lowest = groups.lowest(torch.where(known, rewards, torch.inf))
    lowest = torch.where(lowest.isinf(), 0, lowest)

    above_lowest = torch.where(known, rewards - lowest, 0)
    count = groups.sum(known.to(rewards.dtype)).clamp(min=1)
    mean = lowest + (groups.sum(above_lowest) / count)[groups.of_row]
    return torch.where(known, rewards, mean)
