from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.kept_ranks import run_kept
from verl_like.process.worker import Worker
from workers.parallel.groups import RankGroups
from workers.parallel.sharding import ParallelDims


def test_ranks_are_numbered_with_tp_fastest() -> None:
    dims = ParallelDims(pp=2, replicate=1, shard=2, sp=1, tp=2)
    assert (dims.world, dims.data_size, dims.model_size, dims.per_stage) == (8, 2, 4, 4)
    assert list(dims.axes()) == ["pp", "replicate", "shard", "sp", "tp"]
    assert [dims.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1] * 2
    assert [rank for rank in range(8) if dims.is_collect(rank)] == [4, 6]
    assert dims.coordinates(6) == {"pp": 1, "replicate": 0, "shard": 1, "sp": 0, "tp": 0}


def groups_of(dims: ParallelDims) -> dict[str, Any]:
    worker = Worker()
    worker.open_process_group()
    groups = RankGroups(dims, torch.device("cpu"))
    named = ("data", "loss", "model", "sp", "tp", "pp", "batch", "world")
    ranks = {name: getattr(groups, name) for name in named}
    numbers: dict[str, Any] = {
        name: group and dist.get_process_group_ranks(group) for name, group in ranks.items()
    }
    numbers["fsdp"] = groups.fsdp_mesh.mesh.tolist(), groups.fsdp_mesh.mesh_dim_names
    return numbers


@pytest.mark.parametrize(
    ("dims", "last"),
    [
        (
            ParallelDims(shard=2, sp=2),
            {"data": [1, 3], "loss": [0, 1, 2, 3], "model": [2, 3], "sp": [2, 3]}
            | {"fsdp": ([0, 1, 2, 3], ("shard_sp",))},
        ),
        (
            ParallelDims(replicate=2, shard=2),
            {"data": [0, 1, 2, 3], "loss": [0, 1, 2, 3]}
            | {"fsdp": ([[0, 1], [2, 3]], ("replicate", "shard"))},
        ),
        (
            ParallelDims(replicate=2, tp=2),
            {"data": [1, 3], "loss": [1, 3], "model": [2, 3], "tp": [2, 3]}
            | {"fsdp": ([[1], [3]], ("replicate", "shard"))},
        ),
        (
            ParallelDims(replicate=2, sp=2),
            {"data": [1, 3], "loss": [0, 1, 2, 3], "model": [2, 3], "sp": [2, 3]}
            | {"fsdp": ([[0, 1], [2, 3]], ("replicate", "shard_sp"))},
        ),
        (
            ParallelDims(pp=2, tp=2),
            {"model": [0, 1, 2, 3], "tp": [2, 3], "pp": [1, 3], "fsdp": ([3], ("shard",))}
            | {"batch": [1, 3]},
        ),
    ],
    ids=str,
)
def test_groups_of_ranks_by_axis(dims: ParallelDims, last: dict[str, Any]) -> None:
    absent = dict.fromkeys(("data", "loss", "model", "sp", "tp", "pp"))
    expected = absent | {"world": [0, 1, 2, 3], "batch": last.get("data")} | last
    assert run_kept(4, groups_of, dims)[3] == expected
