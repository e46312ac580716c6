"""RLOO for process rewards: compares the return from each step on with other samples' returns.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from verl_like.tensor_ops.masked import zero_outside


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
