"""The optimizer's groups of weights: their decay and their schedule."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config, weights_of
from workers.config import OptimConfig, WorkersConfig
from workers.roles.actor import ActorWorker
from workers.training.optim import Schedule, build_optimizer

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
    build_optimizer(module.parameters(), config).step()
    for parameter in module.parameters():
        decayed = bool((parameter < 1.0).all())
        assert decayed == (parameter.dim() == 2 or optimizer == "AdamW")
        assert decayed or parameter.equal(torch.ones_like(parameter))


def test_the_schedule_sets_the_rate_of_both_groups() -> None:
    config = OptimConfig(optimizer="AdamWMatrixDecay", lr=0.1, lr_warmup_steps=3)
    optimizer = build_optimizer(nn.Linear(3, 3).parameters(), config)
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
