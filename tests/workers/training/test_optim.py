"""The optimizer's groups of weights, their decay, and the schedules of the learning rate."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import get_scheduler

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config, weights_of
from verl_like.errors import ConfigError
from workers.config import OptimConfig, WorkersConfig
from workers.roles.actor import ActorWorker
from workers.training.optim import (
    LR_SCHEDULES,
    Schedule,
    build_optimizer,
    check_optim,
    lr_factor,
)

TOTAL = 20
WARMUP = 4


def cosine_twin(done: int, left: int, low: float) -> float:
    return low + (1 - low) * (1 + math.cos(math.pi * done / (done + left))) / 2


def linear_twin(done: int, left: int, low: float) -> float:
    return (left + low * done) / (done + left)


def constant_twin(done: int, left: int, low: float) -> float:
    return 1.0


def wsd_twin(done: int, left: int, low: float) -> float:
    """The last quarter of the 16 steps after the warm-up decays."""
    return 1.0 if left >= 4 else (left + low * (4 - left)) / 4


TWINS = {
    "constant": constant_twin,
    "cosine": cosine_twin,
    "linear": linear_twin,
    "wsd": wsd_twin,
}


def optim(name: str, **changes: Any) -> OptimConfig:
    settings = {"lr_warmup_steps": WARMUP, "min_lr_ratio": 0.1, "wsd_decay_ratio": 0.25}
    return OptimConfig(lr_scheduler_type=name, **settings | changes)


def curve(config: OptimConfig, num_calls: int = TOTAL + 3) -> list[float]:
    return [lr_factor(step, TOTAL, config) for step in range(num_calls)]


@pytest.mark.parametrize("name", LR_SCHEDULES)
def test_a_schedule_matches_its_definition(name: str) -> None:
    expected = [(step + 1) / (WARMUP + 1) for step in range(WARMUP)]
    for step in range(WARMUP, TOTAL + 3):
        left = max(TOTAL - step, 0)
        expected.append(TWINS[name](TOTAL - WARMUP - left, left, 0.1))
    assert curve(optim(name)) == pytest.approx(expected, rel=1e-12)


def test_a_warmup_ratio_equals_that_number_of_steps() -> None:
    by_ratio = optim("wsd", lr_warmup_steps=-1, lr_warmup_steps_ratio=0.2)
    assert curve(by_ratio) == curve(optim("wsd"))
    assert lr_factor(0, TOTAL, optim("cosine", lr_warmup_steps=-1)) == 1.0


@pytest.mark.parametrize("name", ["cosine", "linear"])
def test_a_warm_up_from_0_has_the_rates_of_transformers(name: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    theirs = get_scheduler(name, torch.optim.SGD([weight], lr=1.0), WARMUP, TOTAL)
    rates = []
    for _ in range(TOTAL):
        rates += theirs.get_last_lr()
        theirs.optimizer.step()
        theirs.step()
    ours = optim(name, lr_warmup_init_ratio=0.0, min_lr_ratio=0.0)
    assert curve(ours, TOTAL) == pytest.approx(rates, rel=1e-12)


def halved(progress: float, min_lr_ratio: float) -> float:
    return 0.5 + min_lr_ratio


def asks_for_more(progress: float, min_lr_ration: float) -> float:
    return min_lr_ration


def test_a_user_s_schedule_is_found_by_its_path_and_gets_its_settings() -> None:
    assert lr_factor(WARMUP, TOTAL, optim(f"{__name__}.halved")) == 0.6


def test_a_parameter_that_is_no_key_is_rejected_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'min_lr_ration' is not a key.*'min_lr_ratio'"):
        check_optim(optim(f"{__name__}.asks_for_more"), "optim")


DECAYING = OptimConfig(optimizer="AdamWMatrixDecay", lr=0.1, weight_decay=0.5)


def config_of(one_layer_dir: Path) -> WorkersConfig:
    return tiny_config(one_layer_dir, ppo_mini_batch_size=2, optim=DECAYING)


@pytest.mark.parametrize("optimizer", ["AdamW", "AdamWMatrixDecay"])
def test_matrix_decay_spares_norms_and_biases(optimizer: str) -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    for parameter in module.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    config = OptimConfig(optimizer=optimizer, lr=0.1, weight_decay=0.5)
    build_optimizer(module, config).step()
    for parameter in module.parameters():
        decayed = bool((parameter < 1.0).all())
        assert decayed == (parameter.dim() == 2 or optimizer == "AdamW")
        assert decayed or parameter.equal(torch.ones_like(parameter))


def test_the_schedule_sets_the_rate_of_both_groups() -> None:
    config = OptimConfig(optimizer="AdamWMatrixDecay", lr=0.1, lr_warmup_steps=3)
    optimizer = build_optimizer(nn.Linear(3, 3), config)
    schedule = Schedule(optimizer, config, 10)
    schedule.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]


def moved_without_gradient(one_layer_dir: Path) -> tuple[bool, bool]:
    """Return whether any norm, and every matrix, changed in an update without advantages."""
    actor = started(ActorWorker, config_of(one_layer_dir), 10)
    before = weights_of(actor)
    batch = make_batch(4)
    batch.batch["advantages"].zero_()
    actor.update_actor(own_chunk(batch, actor.rank, actor.world_size))
    norms: list[bool] = []
    matrices: list[bool] = []
    for name, tensor in actor.engine.named_full_tensors():
        (matrices if tensor.dim() >= 2 else norms).append(not tensor.equal(before[name]))
    return any(norms), all(matrices)


def test_norms_do_not_change_without_a_gradient(one_layer_dir: Path) -> None:
    for norms_moved, matrices_moved in run_kept(2, moved_without_gradient, one_layer_dir):
        assert not norms_moved
        assert matrices_moved
