"""Optimal token baseline (OTB): the baseline per token that minimizes the gradient's variance.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import (
    discounted_returns,
    order_inside_first,
    put_back,
    put_in_order,
)
from verl_like.tensor_ops import zero_outside


@ADVANTAGE_ESTIMATORS.register("optimal_token_baseline", "tir_optimal_token_baseline")
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    index: Index,
) -> tuple[Tensor, Tensor]:
    """The return G of token t minus the W-weighted mean of G over the t-th tokens of its group.

    W is the sum over the tokens so far of `1 - 2 p + sum(p^2 over the vocabulary)`: the squared
    norm of the gradient of log p with respect to the logits. t counts only tokens inside the mask,
    as in verl's `tir_optimal_token_baseline`. A token that only one of several samples reaches gets
    0 (in verl, its raw return). A group of one sample keeps its raw returns. W ignores importance
    weights.

    Watch: If `actor/grad_norm` is not lower and steadier than with `rloo` or `grpo`, W is nearly
    equal for all samples: use one of those two.

    Source: arXiv 2602.07078
    """
    groups = Groups.of(index, token_level_rewards[:, 0])
    order = order_inside_first(response_mask)
    returns = put_in_order(discounted_returns(token_level_rewards, response_mask, 1.0), order)
    lead = returns - _lowest_score(returns, groups)

    columns = (old_log_probs, sum_pi_squared, response_mask.bool())
    weights = _weights(*(put_in_order(column, order) for column in columns))
    total = returns.new_zeros(len(groups.size), returns.shape[1])
    weighted = torch.zeros_like(total)
    total.index_add_(0, groups.of_row, weights)
    weighted.index_add_(0, groups.of_row, weights * lead)
    mean = weighted / total.masked_fill(total == 0, 1)
    mean[groups.size == 1] = 0  # a group of one keeps its returns

    advantages = put_back(lead - mean[groups.of_row], order)
    return zero_outside(advantages, response_mask), put_back(returns, order)


def _weights(old_log_probs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    """Return W for every token of ordered rows, and 0 outside the mask."""
    norms = (1 - 2 * old_log_probs.exp() + sum_pi_squared).clamp(min=0)
    # values outside the mask come after a row's tokens, so no token's sum includes them
    return zero_outside(norms.cumsum(dim=-1), mask)


def _lowest_score(ordered_returns: Tensor, groups: Groups) -> Tensor:
    """Return the lowest score of each row's group, [rows, 1].

    Subtracting it first gives exactly zero for equal scores. It is 0 in a group of one. A row's
    score is the return of its first token.
    """
    lowest = groups.lowest(ordered_returns[:, 0])
    return torch.where(groups.size_of_row() > 1, lowest, 0).unsqueeze(-1)
