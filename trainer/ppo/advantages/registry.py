"""Advantage estimators by name.

    @ADVANTAGE_ESTIMATORS.register("mine")
    def compute_mine(token_level_rewards, response_mask, index): ...

The names of its parameters say what an estimator gets: see `trainer.ppo.compute_advantage`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from verl_like.registry import Registry

Estimator = Callable[..., tuple[Tensor, Tensor]]

ADVANTAGE_ESTIMATORS: Registry[Estimator] = Registry("advantage estimator")
