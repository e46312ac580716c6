"""Optimal token baseline (OTB): a baseline for every token, of least variance of the gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, compares_samples
from trainer.ppo.advantages.returns import (
    order_inside_first,
    put_back,
    put_in_order,
    returns_of,
)


@ADVANTAGE_ESTIMATORS.register("optimal_token_baseline")
@compares_samples
@torch.no_grad()
def compute_optimal_token_baseline_advantage(
    token_level_rewards: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    response_mask: Tensor,
    index: Index,
) -> tuple[Tensor, Tensor]:
    """Return G of a token, less the mean of G over its group's t-th tokens, weighed by W.

    W adds up 1 - 2 p + sum of p squared over the tokens so far: the squared norm of the gradient of
    their log-probs by the logits, so samples of large gradients count for more. At a token that one
    sample alone reaches the advantage is zero. A group of one keeps its raw return.

    Watch: `actor/grad_norm`; it should be lower and steadier than with rloo or grpo, and where it
    is not, W is nearly equal for all samples and the baseline is the plain mean.

    Source: arXiv 2602.07078
    """
    order = order_inside_first(response_mask)
    groups = Groups.of(index, token_level_rewards[:, 0])
    returns = put_in_order(returns_of(token_level_rewards, response_mask, 1.0), order)
    outside = put_in_order(response_mask == 0, order)

    chances = torch.exp(put_in_order(old_log_probs, order))
    weights = torch.sub(put_in_order(sum_pi_squared, order), chances, alpha=2)
    del chances
    weights.add_(1).clamp_(min=0)
    # what lies outside comes after a row's tokens, so no sum of theirs has it
    weights.cumsum_(dim=-1).masked_fill_(outside, 0)

    advantages = returns - _lowest_score(returns, groups).unsqueeze(-1)
    advantages.sub_(_weighed_means_(advantages, weights, groups)).masked_fill_(outside, 0)
    return put_back(advantages, order), put_back(returns, order)


def _lowest_score(ordered_returns: Tensor, groups: Groups) -> Tensor:
    """For each row, its group's lowest score, so that equal scores give exactly zero.

    Zero in a group of one. A row's score is the return of its first token.
    """
    lowest = torch.zeros_like(groups.size)
    scores = ordered_returns[:, 0]
    lowest.scatter_reduce_(0, groups.of_row, scores, "amin", include_self=False)
    return torch.where(groups.size > 1, lowest, 0)[groups.of_row]


def _weighed_means_(values: Tensor, weights: Tensor, groups: Groups) -> Tensor:
    """For each row, its group's weighed mean of every column; zero in a group of one.

    Written over `weights`.
    """
    empty = values.new_zeros(len(groups.size), values.shape[1])
    total = empty.index_add(0, groups.of_row, weights)
    means = empty.index_add_(0, groups.of_row, weights.mul_(values))
    means.div_(total.masked_fill_(total == 0, 1)).masked_fill_(groups.size[:, None] == 1, 0)
    return torch.index_select(means, 0, groups.of_row, out=weights)
