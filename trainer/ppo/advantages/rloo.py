"""Baselines from a prompt's samples, without a standard deviation: RLOO, OPO, GPG.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, sequence_scores
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, kl_belongs_in_loss
from verl_like.tensor_ops import zero_outside


@ADVANTAGE_ESTIMATORS.register("rloo", "rloo_vectorized")
@torch.no_grad()
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the mean score of the group's other samples.

    Watch: If `actor/grad_norm` is always above `actor.grad_clip`, scale the scores, or bound them
    (`algorithm.score_clip`).

    Source: arXiv 2402.14740
    """
    scores = sequence_scores(token_level_rewards)
    groups = Groups.of(index, scores)
    from_mean_to_others = groups.size / (groups.size - 1).clamp(min=1)
    advantages = groups.centered(scores) * from_mean_to_others[groups.of_row]
    advantages = on_tokens(advantages, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("rloo_process")
@torch.no_grad()
def compute_rloo_process_advantage(
    token_level_scores: Tensor, step_ends: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The summed scores of the token's step and all later steps, minus the other samples' mean.

    The k-th step is compared with the k-th steps of the prompt's other samples; `step_ends` marks
    the last token of each step. A step that no other sample reached keeps its raw sum. The
    estimator is unbiased even if the policy chooses its number of steps.

    Watch: If `actor/grad_norm` is always above `actor.grad_clip`, scale the scores, or bound them
    (`algorithm.score_clip`).

    Source: leave-one-out of arXiv 2402.14740, applied to each step
    """
    ends = step_ends.bool() & response_mask.bool()
    rows, places = ends.nonzero(as_tuple=True)
    num_before = ends.cumsum(dim=-1) - ends.long()  # also the number of a token's own step
    step = num_before[rows, places]
    num_steps = int(ends.sum(dim=-1).max())

    # [rows, steps], not tokens: equal scores then add up to the same bits at any token position
    scores = token_level_scores.new_zeros(len(ends), num_steps)
    scores[rows, step] = token_level_scores[rows, places]
    to_go = scores.flip(-1).cumsum(dim=-1).flip(-1)[rows, step]

    groups = Groups.of(index, token_level_scores[:, 0])
    same_step = Groups.of((groups.of_row[rows] * max(num_steps, 1) + step).tolist(), to_go)
    from_mean_to_others = same_step.size / (same_step.size - 1).clamp(min=1)
    lead = same_step.centered(to_go) * from_mean_to_others[same_step.of_row]

    of_steps = token_level_scores.new_zeros(len(ends), num_steps + 1)  # 0 after the last step
    of_steps[rows, step] = lead
    advantages = zero_outside(of_steps.gather(1, num_before), response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("opo")
@kl_belongs_in_loss
@torch.no_grad()
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, in which samples are weighted by length.

    This baseline has the least variance if gradients grow with length.

    Watch: If `actor/ppo_kl` is not 0, set `actor.ppo_mini_batch_size` to the whole batch and
    `actor.ppo_epochs` to 1.

    Source: arXiv 2505.23585
    """
    scores = sequence_scores(token_level_rewards)
    lengths = torch.count_nonzero(response_mask, dim=-1).to(scores.dtype)
    centered = Groups.of(index, scores).centered(scores, weights=lengths)
    advantages = on_tokens(centered, response_mask)
    return advantages, advantages


@ADVANTAGE_ESTIMATORS.register("gpg")
@kl_belongs_in_loss
@torch.no_grad()
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index
) -> tuple[Tensor, Tensor]:
    """The score minus the group's mean, times `samples / samples with a nonzero score`.

    The factor is verl's; the paper leaves out groups of equal scores instead. A group of one sample
    keeps its raw score, times the factor.

    Watch: If `critic/advantages/max` jumps, few scores may be nonzero: lower the learning rate, or
    use `grpo`.

    Source: arXiv 2504.02546
    """
    scores = sequence_scores(token_level_rewards)
    centered = Groups.of(index, scores).centered(scores)
    scale = len(scores) / torch.count_nonzero(scores).clamp(min=1)
    advantages = on_tokens(centered * scale.to(scores.dtype), response_mask)
    return advantages, advantages
