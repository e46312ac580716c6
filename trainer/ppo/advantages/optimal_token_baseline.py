"""Optimal token baseline (OTB): the baseline per token that minimizes the gradient's variance.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import order_inside_first, put_back, put_in_order, returns_of
from verl_like.tensor_ops import zero_outside
from workers.losses.blocks import row_blocks


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
    returns = torch.empty_like(token_level_rewards)
    blocks = row_blocks(response_mask)
    orders = [order_inside_first(response_mask[rows]) for rows in blocks]
    for rows, order in zip(blocks, orders, strict=True):
        of_block = returns_of(token_level_rewards[rows], response_mask[rows], 1.0)
        returns[rows] = put_in_order(of_block, order)
    lowest = _lowest_score(returns, groups)

    weight = returns.new_zeros(len(groups.size), returns.shape[1])
    mean = torch.zeros_like(weight)
    for rows, order in zip(blocks, orders, strict=True):
        columns = (old_log_probs[rows], sum_pi_squared[rows], response_mask[rows].bool())
        weights = _weights(*(put_in_order(column, order) for column in columns))
        weight.index_add_(0, groups.of_row[rows], weights)
        mean.index_add_(0, groups.of_row[rows], weights.mul_(returns[rows] - lowest[rows]))
    mean.div_(weight.masked_fill_(weight == 0, 1)).masked_fill_(groups.size[:, None] == 1, 0)

    advantages = torch.empty_like(returns)
    for rows, order in zip(blocks, orders, strict=True):
        lead = returns[rows] - lowest[rows]
        lead.sub_(mean[groups.of_row[rows]])
        advantages[rows] = zero_outside(put_back(lead, order), response_mask[rows])
        returns[rows] = put_back(returns[rows], order)
    return advantages, returns


def _weights(old_log_probs: Tensor, sum_pi_squared: Tensor, mask: Tensor) -> Tensor:
    """Return W for every token of ordered rows, and 0 outside the mask."""
    norms = torch.sub(sum_pi_squared, old_log_probs.exp(), alpha=2).add_(1).clamp_(min=0)
    # values outside the mask come after a row's tokens, so no token's sum includes them
    return zero_outside(norms.cumsum_(dim=-1), mask)


def _lowest_score(ordered_returns: Tensor, groups: Groups) -> Tensor:
    """Return the lowest score of each row's group, [rows, 1].

    Subtracting it first gives exactly zero for equal scores. It is 0 in a group of one. A row's
    score is the return of its first token.
    """
    lowest = groups.lowest(ordered_returns[:, 0])
    return torch.where(groups.size_of_row() > 1, lowest, 0).unsqueeze(-1)
