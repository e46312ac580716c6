"""A weight that no token of a rank reaches does not block the sum of gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.workers.kept_ranks import run_kept
from verl_like.process.worker import Worker
from workers.parallel.dims import ParallelDims
from workers.parallel.fsdp import add_up_gradients, begin_pass, full_tensor, shard
from workers.parallel.groups import RankGroups


class Experts(nn.Module):
    """Three experts, of which a pass uses one, and a head."""

    _no_split_modules = ("Expert",)

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, size, bias=False) for size in (2, 6, 4))
        self.heads = nn.ModuleList(nn.Linear(size, 1, bias=False) for size in (2, 6, 4))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)

    def forward(self, tokens: Tensor, expert: int) -> Tensor:
        score: Tensor = self.heads[expert](self.experts[expert](tokens)).sum()
        return score


def gradients(strategy: str) -> dict[str, Tensor]:
    """Return full gradients after two passes; each rank's passes use a different expert."""
    worker = Worker()
    worker.open_process_group()
    module = Experts()
    is_sharded = strategy == "fsdp"
    if is_sharded:
        mesh = RankGroups(ParallelDims(shard=worker.world_size), worker.device).fsdp_mesh
        is_one_unit = shard(module, mesh, None)
    for last in (False, True):
        if is_sharded:
            begin_pass(module, is_one_unit, last)
        for rank in range(2) if worker.world_size == 1 else [worker.rank]:
            module(torch.full((3, 4), rank + 1.0), rank).backward()
    if not is_sharded:
        group = torch.distributed.group.WORLD if worker.world_size > 1 else None
        add_up_gradients(list(module.parameters()), group)
    grads = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        grads[name] = full_tensor(parameter.grad)
    return grads


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_expert_unused_on_one_rank_has_the_other_rank_s_gradient(strategy: str) -> None:
    one_rank = gradients("single")
    assert len(one_rank) == 6
    assert not one_rank["experts.2.weight"].any()
    for ours in run_kept(2, gradients, strategy):
        assert ours.keys() == one_rank.keys()
        for name, gradient in one_rank.items():
            torch.testing.assert_close(ours[name], gradient)
