"""Advantage estimators by name.

    @ADVANTAGE_ESTIMATORS.register("mine")
    def compute_mine(token_level_rewards, response_mask, index): ...

An estimator's parameter names determine its arguments: see `trainer.ppo.advantage_inputs`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from verl_like.registry import Registry, check_by_name

Estimator = Callable[..., tuple[Tensor, Tensor]]
AnyEstimator = TypeVar("AnyEstimator", bound=Estimator)

ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry(
    "advantage estimator",
    check_by_name,
    "(<columns and settings by name>) -> (advantages [rows, R], returns [rows, R])",
)
"""Names for `algorithm.adv_estimator`.

A parameter's name says what it gets: a column, such as `token_level_rewards` or `values`; `index`,
the uids of the rows; or a setting, such as `gamma` or `lam`.

    @ADVANTAGE_ESTIMATORS.register("centered")
    def compute_centered_advantage(token_level_rewards, response_mask):
        scores = token_level_rewards.sum(dim=-1, keepdim=True)          # [rows, 1]
        advantages = (scores - scores.mean()) * response_mask
        return advantages, advantages
"""


def needs_groups(estimator: Estimator) -> bool:
    """Return whether the estimator compares the samples of a prompt, so that it needs several."""
    return "index" in inspect.signature(estimator).parameters


def kl_belongs_in_loss(estimator: AnyEstimator) -> AnyEstimator:
    """Mark an estimator like GRPO: a run with the KL in the reward then prints a warning.

    Example:

        @kl_belongs_in_loss
        def compute_my_grpo(token_level_rewards, response_mask, index): ...
    """
    estimator.wants_kl_in_loss = True  # type: ignore[attr-defined]
    return estimator


def wants_kl_in_loss(estimator: Estimator) -> bool:
    """Return whether `kl_belongs_in_loss` marks the estimator."""
    return getattr(estimator, "wants_kl_in_loss", False)
