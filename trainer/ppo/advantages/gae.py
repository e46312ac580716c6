"""Generalized advantage estimation (GAE), the estimator of the PPO paper; it needs a critic.

Tensors are [rows, R], except `truncated` [rows], a bool. Advantages and returns are zero outside
the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import (
    discounted_sum,
    order_inside_first,
    put_back,
    put_in_order,
    whiten_,
)
from verl_like.tensor_ops import zero_outside


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
    """The sum of the TD errors from each token on, discounted by `gamma * lam`, then whitened.

    The TD error at token t is `reward[t] + gamma * value[t + 1] - value[t]`. After the last token,
    the value is 0; in a truncated row, with `bootstrap_truncated`, it is the value at the last
    token. The returns are the unwhitened advantages plus the values.

    Watch: If `critic/vf_explained_var` is near or below 0, set `trainer.critic_warmup`, or raise
    the critic's learning rate.

    Source: arXiv 1506.02438
    """
    inside = (response_mask != 0).to(values.dtype)
    order = order_inside_first(response_mask)
    values = zero_outside(values, response_mask)
    ordered_values = put_in_order(values, order)

    errors = put_in_order(inside.mul_(token_level_rewards), order).sub_(ordered_values)
    errors[:, :-1].add_(ordered_values[:, 1:], alpha=gamma)
    if truncated is not None:
        lengths = torch.count_nonzero(response_mask, dim=-1)
        rows = (truncated & (lengths > 0)).nonzero().squeeze(-1)
        last = lengths[rows] - 1
        errors[rows, last] += gamma * ordered_values[rows, last]

    advantages = put_back(discounted_sum(errors, gamma * lam), order)
    del errors, inside  # frees memory before whitening allocates
    returns = values.add_(advantages)
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, returns
