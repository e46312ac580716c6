"""Ranks that share rows give the numbers of one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config, weights_of
from tests.workers.training.test_sequence_ranks import distance
from verl_like.errors import ConfigError
from workers.config import FSDPConfig, ParallelConfig
from workers.parallel.dims import ParallelDims
from workers.parallel.sharding import dims_of, settle
from workers.roles.actor import ActorWorker


def update_on(folder: Path, tp: int) -> Any:
    """Do an update with tensor parallelism inside a model group."""
    config = tiny_config(folder, ppo_mini_batch_size=3)
    config.parallel = ParallelConfig(tp=tp)
    actor = started(ActorWorker, config, 10)
    dims = actor.engine.dims
    data = own_chunk(make_batch(6), dims.data_rank(actor.rank), dims.data_size)
    metrics = actor.update_actor(data)
    numbers = {name: value for name, value in metrics.items() if not name.startswith("perf/")}
    return numbers, weights_of(actor)


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (4, 2)])
def test_ranks_with_the_same_rows_give_the_numbers_of_one(
    one_layer_dir: Path, world: int, tp: int
) -> None:
    [(expected, weights)] = run_kept(1, update_on, one_layer_dir, 1)
    for metrics, own in run_kept(world, update_on, one_layer_dir, tp):
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert distance(own, weights) < 1e-6


def test_the_axes_fill_the_pool() -> None:
    config = FSDPConfig()
    assert dims_of(4, settle("fsdp", config, ParallelConfig(pp=2))) == ParallelDims(pp=2, shard=2)
    with pytest.raises(ConfigError, match="fsdp_size=2 and parallel.shard=4 set the same size"):
        settle("fsdp", FSDPConfig(fsdp_size=2), ParallelConfig(shard=4))
    assert dims_of(4, settle("fsdp", config, ParallelConfig(shard=2))) == ParallelDims(
        replicate=2, shard=2
    )


def test_models_that_do_not_fill_the_pool_are_refused() -> None:
    axes = settle("fsdp", FSDPConfig(), ParallelConfig(sp=3, tp=2))
    with pytest.raises(
        ConfigError, match="1 x 3 x 2 = 6 ranks per model .* the 8 ranks .*nearest: 4 or 8"
    ):
        dims_of(8, axes)
    axes = settle("fsdp", FSDPConfig(fsdp_size=3), ParallelConfig(tp=2))
    with pytest.raises(ConfigError, match="does not divide the 8 / 2 = 4 ranks; valid: .* 1, 2, 4"):
        dims_of(8, axes)
