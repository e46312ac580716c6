"""REINFORCE++: discounted returns, whitened over the batch; no critic and no groups.

Tensors are [rows, R]. Advantages and returns are zero outside the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.ppo.advantages.returns import returns_of
from trainer.ppo.advantages.whiten import whiten_


@ADVANTAGE_ESTIMATORS.register("reinforce_plus_plus")
@torch.no_grad()
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, gamma: float = 1.0, whiten: bool = True
) -> tuple[Tensor, Tensor]:
    """The token's discounted return, whitened.

    Watch: If `critic/score/mean` stays flat while `actor/grad_norm` does not fall, use
    `reinforce_plus_plus_baseline` with `rollout.n` above 1.

    Source: arXiv 2501.03262
    """
    returns = returns_of(token_level_rewards, response_mask, gamma)
    advantages = returns.clone()
    if whiten:
        advantages = whiten_(advantages, response_mask)
    return advantages, returns
