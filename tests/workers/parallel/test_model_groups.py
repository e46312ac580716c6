"""Sizes of the axes for a pool of ranks."""

from __future__ import annotations

import pytest

from verl_like.errors import ConfigError
from workers.config import FSDPConfig, ParallelConfig
from workers.parallel.sharding import ParallelDims, dims_of, resolve_sharding


def test_the_axes_fill_the_pool() -> None:
    config = FSDPConfig()
    assert dims_of(4, resolve_sharding("fsdp", config, ParallelConfig(pp=2))) == ParallelDims(
        pp=2, shard=2
    )
    with pytest.raises(ConfigError, match="fsdp_size=2 and parallel.shard=4 both set the number"):
        resolve_sharding("fsdp", FSDPConfig(fsdp_size=2), ParallelConfig(shard=4))
    assert dims_of(4, resolve_sharding("fsdp", config, ParallelConfig(shard=2))) == ParallelDims(
        replicate=2, shard=2
    )


def test_models_that_do_not_fill_the_pool_are_rejected() -> None:
    axes = resolve_sharding("fsdp", FSDPConfig(), ParallelConfig(sp=3, tp=2))
    with pytest.raises(
        ConfigError, match="1 x 3 x 2 = 6 ranks per model .* the 8 ranks .*nearest: 4 or 8"
    ):
        dims_of(8, axes)
    axes = resolve_sharding("fsdp", FSDPConfig(fsdp_size=3), ParallelConfig(tp=2))
    with pytest.raises(ConfigError, match="does not divide the 8 / 2 = 4 ranks; valid: .* 1, 2, 4"):
        dims_of(8, axes)
