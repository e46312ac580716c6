"""A module with the names of verl 0.9.1, backed by our functions, and a choice of the batches."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.tools.check_loss.batches import all_batches
from workers.losses.aggregate import agg_loss
from workers.losses.kl import kl_penalty
from workers.losses.value import compute_value_loss

NOT_INSTALLED = (
    "it is not installed: pip install trl==1.16 verl==0.9.1 in an environment of their own, "
    "with this package, and run tests/trainer/tools/check_loss there"
)


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
    loss_scale_factor: float | None = None
    use_kl_loss: bool = False
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
            old_log_prob: Tensor,
            log_prob: Tensor,
            advantages: Tensor,
            response_mask: Tensor,
            loss_agg_mode: str,
            config: Any,
        ) -> tuple[Tensor, dict[str, Any]]:
            counts = dict(config.global_batch_info)
            dp_size = counts.pop("dp_size")
            columns = old_log_prob, log_prob, advantages, response_mask
            total, metrics = loss(*columns, loss_agg_mode, config, **counts)
            return total * dp_size, metrics

        return call

    module = types.ModuleType("verl.trainer.ppo.core_algos")
    vars(module).update(
        ActorConfig=ActorConfig,
        AlgoConfig=AlgoConfig,
        POLICY_LOSS_REGISTRY={name: as_verls(loss) for name, loss in losses.items()},
        ADV_ESTIMATOR_REGISTRY=dict(ADVANTAGE_ESTIMATORS),
        compute_value_loss=compute_value_loss,
        kl_penalty=kl_penalty,
        agg_loss=agg_loss,
    )
    for name in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)


def few_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep four of the 24 batches: among them are every move, holes, and a row without a token."""
    chosen = all_batches()[4:20:4]
    for module in ("trainer.tools.check_loss", "trainer.tools.migrate.prove"):
        monkeypatch.setattr(f"{module}.all_batches", lambda: chosen)
