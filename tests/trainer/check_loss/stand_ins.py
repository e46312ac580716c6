"""A module with the names that are taken from verl 0.9.1, and our functions behind them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS


@dataclass
class PolicyLossConfig:
    dro_beta: float | None = None
    args: dict[str, Any] = field(default_factory=dict)
    """The settings that our losses read."""


@dataclass
class ActorConfig:
    strategy: str
    rollout_n: int
    use_dynamic_bsz: bool
    loss_agg_mode: str = "token-mean"
    clip_ratio: float = 0.2
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    clip_ratio_c: float = 3.0
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)


@dataclass
class AlgoConfig:
    gamma: float = 1.0
    lam: float = 1.0


def stand_in_for_verl(
    monkeypatch: pytest.MonkeyPatch, losses: Mapping[str, Callable[..., Any]]
) -> None:
    """Install the module; these losses, with our signature, are called as verl's are."""

    def as_verls(loss: Callable[..., Any]) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
        def call(
            old: Tensor, new: Tensor, advantages: Tensor, mask: Tensor, mode: str, config: Any
        ) -> tuple[Tensor, dict[str, Any]]:
            counts = dict(config.global_batch_info)
            dp_size = counts.pop("dp_size")
            total, metrics = loss(old, new, advantages, mask, mode, config, **counts)
            return total * dp_size, metrics

        return call

    module = types.ModuleType("verl.trainer.ppo.core_algos")
    vars(module).update(
        ActorConfig=ActorConfig,
        AlgoConfig=AlgoConfig,
        POLICY_LOSS_REGISTRY={name: as_verls(loss) for name, loss in losses.items()},
        ADV_ESTIMATOR_REGISTRY=dict(ADVANTAGE_ESTIMATORS),
    )
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
