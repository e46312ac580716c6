"""Generalised advantage estimation (GAE): PPO's own, with a critic."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import (
    discounted_sum,
    order_inside_first,
    put_back,
    put_in_order,
)
from trainer.ppo.advantages.whiten import whiten_


@ADVANTAGE_ESTIMATORS.register("gae")
@torch.no_grad()
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float,
    lam: float,
    truncated: Tensor | None = None,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """The sum of later errors of the critic, each step back discounted by gamma lam; whitened.

    The error at t is reward(t) + gamma value(t + 1) - value(t), with value 0 after the last token;
    in rows that are `truncated`, with the last token's own value, as if the response went on.
    Returns are the unwhitened advantages plus values; whitening is over the whole batch's tokens.

    Watch: `critic/vf_explained_var`; near or below zero the critic says nothing of the returns yet,
    and the advantages are noise: warm it up (`trainer.critic_warmup`) or raise its learning rate.

    Source: arXiv 1506.02438
    """
    inside = (response_mask != 0).to(values.dtype)
    order = order_inside_first(response_mask)
    values = values * inside
    ordered_values = put_in_order(values, order)

    errors = put_in_order(inside.mul_(token_level_rewards), order).sub_(ordered_values)
    errors[:, :-1].add_(ordered_values[:, 1:], alpha=gamma)
    if truncated is not None:
        lengths = torch.count_nonzero(response_mask, dim=-1)
        rows = (truncated & (lengths > 0)).nonzero().squeeze(-1)
        last = lengths[rows] - 1
        errors[rows, last] += gamma * ordered_values[rows, last]

    advantages = put_back(discounted_sum(errors, gamma * lam), order)
    del errors, inside  # before whitening takes a column of its own
    returns = values.add_(advantages)
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, returns
