"""GRPO for pass@k: only the best sample of a prompt gets a nonzero advantage.

Tensors are [rows, R], `index` is [rows]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.groups import Groups, Index, on_tokens, scores_of
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS, kl_belongs_in_loss


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
    scores = scores_of(token_level_rewards)
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
