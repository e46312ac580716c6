"""Group relative policy optimization (GRPO): compares a sample with the others of its prompt.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, kl_belongs_in_loss


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

    Watch: If `actor/grad_norm` falls to 0 before `critic/score/mean` is at its best, most groups
    have equal scores: set `algorithm.filter_groups.enable`. If `response_length/mean` grows while
    the score does not, use the preset `dr_grpo`.

    Source: GRPO, arXiv 2402.03300; Dr. GRPO, arXiv 2503.20783
    """
    scores = scores_of(token_level_rewards)
    groups = Groups.of(index, scores)
    centered = groups.centered(scores)
    if norm_adv_by_std_in_grpo:
        normalized = centered / (groups.std(centered) + epsilon)
        centered = torch.where(groups.size_of_row() > 1, normalized, centered)
    advantages = on_tokens(centered, response_mask)
    return advantages, advantages
