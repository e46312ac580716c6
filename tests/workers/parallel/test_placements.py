"""Whole weights and a rank's shard of a weight, at every placement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.workers.kept_ranks import run_kept
from verl_like.process.worker import Worker
from workers.models.state import local_rows, local_shard
from workers.parallel.fsdp import full_tensor, tensor_on_first

SHARDED_TWICE = (_StridedShard(0, split_factor=2), Shard(0))
"""FSDP2 splits the rows that tensor parallelism has split: the second axis comes first."""
PACKED = (Shard(0), _StridedShard(1, split_factor=2))
"""Columns of two weights end to end, over the second axis; rows over the first."""
PACKED_TWICE = (_StridedShard(0, split_factor=2), _StridedShard(0, split_factor=2))
"""Rows of two weights end to end over the second axis, then FSDP2's over the first."""
PLACEMENTS = [
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
    SHARDED_TWICE,
    PACKED,
    PACKED_TWICE,
]


def split_by_hand(whole: Tensor, placements: Any, at: int, tp: int) -> Tensor | None:
    """Return the shard for placements that torch splits differently, or not at all."""
    if placements is SHARDED_TWICE:
        return _rows(_rows(whole, tp), at)
    if placements is PACKED:
        first, second = _rows(whole, at).chunk(2, dim=1)
        return torch.cat([_rows(first.T, tp), _rows(second.T, tp)]).T
    if placements is PACKED_TWICE:
        return _rows(torch.cat([_rows(half, tp) for half in whole.chunk(2)]), at)
    return None


def _rows(tensor: Tensor, rank: int) -> Tensor:
    """Return the rows of two ranks."""
    most = -(-len(tensor) // 2)
    return tensor[rank * most : (rank + 1) * most]


def gathers_whole(rows: int) -> list[tuple[bool, bool, bool]]:
    """Return whether every rank, the first rank, and a rank's own rows are right."""
    worker = Worker()
    worker.open_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    whole = torch.arange(rows * 8.0).view(rows, 8)
    results = []
    for placements in PLACEMENTS:
        shard = split_by_hand(whole, placements, *(mesh.get_local_rank(n) for n in ("shard", "tp")))
        if shard is None:
            tensor = distribute_tensor(whole, mesh, placements)
        else:
            tensor = DTensor.from_local(
                shard.contiguous(), mesh, placements, shape=whole.shape, stride=whole.stride()
            )
        first = tensor_on_first(tensor, range(4))
        on_first = torch.equal(first, whole) if first is not None else worker.rank != 0
        is_own_rows = torch.equal(local_rows(tensor, whole), local_shard(tensor))
        results.append((torch.equal(full_tensor(tensor), whole), on_first, is_own_rows))
    return results


@pytest.mark.parametrize("rows", [32, 6, 2])
def test_a_weight_is_gathered_from_every_placement(rows: int) -> None:
    for results in run_kept(4, gathers_whole, rows):
        assert results == [(True, True, True)] * len(PLACEMENTS)
