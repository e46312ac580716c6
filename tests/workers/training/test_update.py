"""The fraction of changed weights is a metric of every update, and equal for every sharding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, started, tiny_config
from workers.config import OptimConfig, ParallelConfig
from workers.roles.actor import ActorWorker
from workers.training import update
from workers.training.update import WeightProbe

NAME = "actor/weights_changed_fraction"


def updated(tiny_dir: Path, lr: float, dtype: str = "float32") -> float:
    config = tiny_config(tiny_dir, optim=OptimConfig(lr=lr), model={"dtype": dtype})
    fraction: float = started(ActorWorker, config, 10).update_actor(make_batch(4))[NAME]
    return fraction


def test_an_update_changes_nearly_all_weights(tiny_dir: Path) -> None:
    assert updated(tiny_dir, 1e-4) > 0.9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tiny_learning_rate_changes_nearly_nothing(tiny_dir: Path, dtype: str) -> None:
    assert updated(tiny_dir, 1e-12, dtype) < 0.002


def fraction_of_planted_changes(tiny_dir: Path, layout: dict[str, int]) -> float:
    """Return the fraction after a third of the rows of every matrix changed."""
    update.MAX_PROBED_ELEMENTS = 100
    config = tiny_config(tiny_dir, parallel=ParallelConfig(**layout))
    engine = started(ActorWorker, config, 10).engine
    with engine.running():
        sample = WeightProbe(engine)
        with torch.no_grad():
            for weight in engine.module.parameters():
                if weight.dim() == 2:
                    weight += changes_like(weight, torch.arange(weight.shape[0]) % 3 == 0)
        return sample.changed_fraction()


def changes_like(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return ones in these rows, sharded as the weight is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    ones = rows[:, None].expand(weight.shape).to(weight.dtype)
    if isinstance(weight, DTensor):
        return distribute_tensor(ones, weight.device_mesh, weight.placements)
    return ones


def test_the_fraction_does_not_depend_on_the_sharding(tiny_dir: Path) -> None:
    (of_one_rank,) = run_kept(1, fraction_of_planted_changes, tiny_dir, {})
    assert 0.2 < of_one_rank < 0.5
    for layout in ({"shard": 2}, {"tp": 2}, {"pp": 2}):
        fractions = run_kept(2, fraction_of_planted_changes, tiny_dir, layout)
        assert fractions == [of_one_rank] * 2, layout
