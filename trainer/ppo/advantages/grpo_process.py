"""GRPO for process rewards: compares a step's score with all steps of the prompt's samples.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import (
    discounted_sum,
    order_inside_first,
    put_back,
    put_in_order,
)


@ADVANTAGE_ESTIMATORS.register("grpo_process")
@torch.no_grad()
def compute_grpo_process_advantage(
    token_level_scores: Tensor,
    step_ends: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """The sum of the normalized scores of a token's step and all later steps.

    Mean and standard deviation (n - 1) are over all steps of the prompt's samples;
    `norm_adv_by_std_in_grpo=false` subtracts only the mean. `step_ends` marks the last token of
    each step. If the policy chooses its number of steps, this estimator is biased; `rloo_process`
    is not.

    Watch: If `critic/advantages/max` and `response_length/mean` both rise, the policy gains by
    making more steps: use `rloo_process`.

    Source: GRPO with process supervision, arXiv 2402.03300, section 4.1.3
    """
    rows, places = (step_ends.bool() & response_mask.bool()).nonzero(as_tuple=True)
    scores = token_level_scores[rows, places]

    groups = Groups.of(index, token_level_scores[:, 0])
    steps = Groups(groups.of_row[rows], torch.bincount(groups.of_row[rows]).to(scores.dtype))
    centered = steps.centered(scores)
    if norm_adv_by_std_in_grpo:
        scaled = centered / (steps.std(centered) + epsilon)
        centered = torch.where(steps.size_of_row() > 1, scaled, centered)

    normalized = torch.zeros_like(token_level_scores)
    normalized[rows, places] = centered
    order = order_inside_first(response_mask)
    later = discounted_sum(put_in_order(normalized, order), 1.0)
    advantages = put_back(later, order).masked_fill_(response_mask == 0, 0)
    return advantages, advantages
