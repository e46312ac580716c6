"""Group relative policy optimization (GRPO) and its relatives: compare a prompt's samples.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, sequence_scores
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, kl_belongs_in_loss
from trainer.ppo.advantages.returns import (
    discounted_sum,
    order_inside_first,
    put_back,
    put_in_order,
    whiten_,
)


@ADVANTAGE_ESTIMATORS.register("grpo", "grpo_vectorized")
@kl_belongs_in_loss
@torch.no_grad()
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, divided by the group's standard deviation.

    With `norm_adv_by_std_in_grpo=false`, there is no division, as in Dr. GRPO.

        scores, mask = torch.tensor([1.0, 0.0]), torch.ones(2, 3, dtype=torch.int64)
        rewards = place_at_last_token(scores, mask)
        advantages, _ = compute_grpo_outcome_advantage(rewards, mask, index=["a", "a"])

    Watch: If `actor/grad_norm` falls to 0 before `critic/score/mean` is at its best, most groups
    have equal scores: set `algorithm.filter_groups.enable`. If `response_length/mean` grows while
    the score does not, use the preset `dr_grpo`.

    Source: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783
    """
    scores = sequence_scores(token_level_rewards)
    groups = Groups.of(index, scores)
    centered = groups.centered(scores)
    if norm_adv_by_std_in_grpo:
        centered = groups.normalized(centered, epsilon)
    advantages = on_tokens(centered, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("grpo_batch_std")
@kl_belongs_in_loss
@torch.no_grad()
def compute_grpo_batch_std_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, divided by the standard deviation of the batch's scores.

    The small differences in a group of nearly equal scores are not amplified.

    Watch: If `critic/advantages/min` sinks while the score nears its limit, a few bad samples
    dominate: use harder prompts.

    Source: Lite PPO, arXiv 2508.08221, section 4
    """
    scores = sequence_scores(token_level_rewards)
    groups = Groups.of(index, scores)
    centered = groups.centered(scores)

    from_mean = scores - scores.mean()
    variance = from_mean.square().sum() / max(len(scores) - 1, 1)
    normalized = centered / (variance.sqrt() + epsilon)
    advantages = torch.where(groups.size_of_row() > 1, normalized, centered)
    advantages = on_tokens(advantages, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("grpo_passk")
@kl_belongs_in_loss
@torch.no_grad()
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
) -> tuple[Tensor, Tensor]:
    """The best sample's lead over the second best of its group; 0 for all other samples.

    The lead is divided by the group's standard deviation, unless `norm_adv_by_std_in_grpo=false`. A
    tie for the best score gives 0. A group of one sample keeps its raw score.

    Watch: If `actor/grad_norm` is near 0, the best samples tie: use scores that seldom tie, or
    `grpo`. If `actor/entropy` falls, the reason may be that no advantage is negative: use `grpo`.

    Source: arXiv 2503.19595
    """
    scores = sequence_scores(token_level_rewards)
    groups = Groups.of(index, scores)
    best, second = _two_best(scores, groups)
    lead = scores[best] - scores[second]
    if norm_adv_by_std_in_grpo:
        lead = lead / (groups.std(groups.centered(scores))[best] + epsilon)

    advantages = torch.zeros_like(scores)
    advantages[best] = torch.where(best == second, scores[best], lead)
    advantages = on_tokens(advantages, response_mask)
    return advantages, advantages


def _two_best(scores: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """Return each group's best and second-best row, which are the same in a group of one."""
    by_score = scores.argsort(descending=True, stable=True)
    by_group = by_score[groups.of_row[by_score].argsort(stable=True)]
    sizes = groups.size.to(torch.int64)
    start = sizes.cumsum(0) - sizes
    return by_group[start], by_group[start + (sizes > 1)]


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
            centered = groups.normalized(centered, epsilon)
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
        centered = steps.normalized(centered, epsilon)

    normalized = torch.zeros_like(token_level_scores)
    normalized[rows, places] = centered
    order = order_inside_first(response_mask)
    later = discounted_sum(put_in_order(normalized, order), 1.0)
    advantages = put_back(later, order).masked_fill_(response_mask == 0, 0)
    return advantages, advantages
