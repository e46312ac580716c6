"""Weights as one tensor, and a rank's part of one, at every placement."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from tests.workers.kept_ranks import run_kept
from verl_like.process.worker import Worker
from workers.models.state import own_part, own_rows
from workers.parallel.fsdp import full_tensor, tensor_on_first

SHARDED_TWICE = (_StridedShard(0, split_factor=2), Shard(0))
"""As FSDP2 cuts the rows that tensor parallelism has cut: the second axis comes first."""
PLACEMENTS = [
    (Replicate(), Shard(0)),
    (Shard(0), Replicate()),
    (Shard(0), Shard(0)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(0)),
    (Replicate(), Shard(1)),
    (Replicate(), Replicate()),
    SHARDED_TWICE,
]


def is_right(rows: int) -> list[tuple[bool, bool, bool]]:
    worker = Worker()
    worker.open_process_group()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    whole = torch.arange(rows * 6.0).view(rows, 6)
    found = []
    for placements in PLACEMENTS:
        if placements is SHARDED_TWICE:
            at, tp = mesh.get_local_rank("shard"), mesh.get_local_rank("tp")
            own = whole.chunk(2)[tp].chunk(2)[at].contiguous()
            tensor = DTensor.from_local(
                own, mesh, placements, shape=whole.shape, stride=whole.stride()
            )
        else:
            tensor = distribute_tensor(whole, mesh, placements)
        first = tensor_on_first(tensor)
        on_first = torch.equal(first, whole) if first is not None else worker.rank != 0
        part = torch.equal(own_rows(tensor, whole), own_part(tensor))
        found.append((torch.equal(full_tensor(tensor), whole), on_first, part))
    return found


@pytest.mark.parametrize("rows", [32, 12])
def test_a_weight_is_whole_at_every_placement(rows: int) -> None:
    for found in run_kept(4, is_right, rows):
        assert found == [(True, True, True)] * len(PLACEMENTS)
