"""Offloading on a simulated GPU: page locks, copies and waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers.kept_ranks import run_kept
from verl_like.process.worker import Worker
from workers.parallel.fsdp import full_tensor, shard
from workers.parallel.groups import RankGroups
from workers.parallel.offload import HostBlocks, resident
from workers.parallel.placements import local_part
from workers.parallel.sharding import ParallelDims, Sharding

GPU = torch.device("cuda")
OFFLOADS = Sharding("fsdp", 1, param_offload=True, optimizer_offload=True)


class SimulatedGPU:
    """A simulated GPU that records locks, fetches and waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.locked: list[tuple[int, int]] = []
        self.fetched: list[Tensor] = []
        self.log: list[str] = []
        """fetch, fetch and wait, copy, copy and wait, wait, give back."""
        to: Any = torch.Tensor.to
        copy: Any = torch.Tensor.copy_

        def fetched(tensor: Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> Any:
            if GPU not in args:
                return to(tensor, *args, non_blocking=non_blocking, **kwargs)
            address = local_part(tensor).data_ptr()
            if not any(local_part(copy).data_ptr() == address for copy in self.fetched):
                self.log.append("fetch" if non_blocking else "fetch and wait")
                tensor = tensor.clone()
                self.fetched.append(tensor)
            return tensor

        def copied(place: Tensor, tensor: Tensor, non_blocking: bool = False) -> Tensor:
            self.log.append("copy" if non_blocking else "copy and wait")
            return copy(place, tensor)

        cudart = SimpleNamespace(cudaHostRegister=self._lock, cudaHostUnregister=self._unlock)
        stream = SimpleNamespace(synchronize=lambda: self.log.append("wait"))
        patch.setattr(torch.cuda, "cudart", lambda: cudart)
        patch.setattr(torch.cuda, "current_stream", lambda _: stream)
        patch.setattr(torch.cuda, "empty_cache", lambda: self.log.append("give back"))
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: self.is_pinned(tensor))
        patch.setattr(torch.Tensor, "to", fetched)
        patch.setattr(torch.Tensor, "copy_", copied)

    def _lock(self, address: int, size: int, flags: int) -> int:
        self.locked.append((address, size))
        return 0

    def _unlock(self, address: int) -> None:
        self.locked = [block for block in self.locked if block[0] != address]

    def is_pinned(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        return any(first <= start < first + size for first, size in self.locked)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimulatedGPU:
    return SimulatedGPU(monkeypatch)


@contextmanager
def training() -> Iterator[tuple[nn.Module, Any]]:
    """A module with a tied weight, a buffer and an optimizer after one step."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    module[2].weight = module[0].weight
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 5)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    yield module, optimizer


def test_weights_and_moments_reuse_one_locked_block_each(
    gpu: SimulatedGPU,
) -> None:
    blocks = HostBlocks()
    with training() as (module, optimizer):
        before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        parameters = [*module.parameters()]
        for _ in range(3):
            with resident(module, optimizer, OFFLOADS, GPU, blocks):
                assert not any(map(gpu.is_pinned, module.parameters()))
            assert all(map(gpu.is_pinned, module.state_dict().values()))
    assert [size % 256 for _, size in gpu.locked] == [0, 0]
    num_weights, num_moments = 5 + 3, 2 * 5
    assert [size for _, size in gpu.locked] == [num_weights * 256, num_moments * 256]
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert [gpu.is_pinned(state) for state in states if state.numel() > 1] == [True] * num_moments
    assert not any(gpu.is_pinned(state) for state in states if state.numel() == 1)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in before.items())
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    assert module[2].weight is module[0].weight


def test_copies_of_locked_memory_wait_only_once_at_the_end(
    gpu: SimulatedGPU,
) -> None:
    blocks, logs = HostBlocks(), []
    with training() as (module, optimizer):
        for _ in range(2):
            gpu.log.clear()
            with resident(module, optimizer, OFFLOADS, GPU, blocks):
                gpu.log.append("call")
            logs.append([*gpu.log])
    num_tensors = 18
    after = ["call", *["copy"] * num_tensors, "wait"]
    assert logs == [["fetch and wait"] * num_tensors + after, ["fetch"] * num_tensors + after]


def test_states_that_stay_on_the_gpu_are_not_copied(gpu: SimulatedGPU) -> None:
    stays = Sharding("fsdp", 1, param_offload=False, optimizer_offload=False)
    with training() as (module, optimizer):
        gpu.log.clear()
        blocks = HostBlocks()
        for sharding, of_module in ((stays, optimizer), (OFFLOADS, None)):
            with resident(module, of_module, sharding, GPU, blocks):
                pass
    assert "give back" not in gpu.log
    assert len(gpu.locked) == 1


def sharded_steps(offloads: bool) -> dict[str, Any]:
    """Two steps of sharded weights, one with rows that two ranks cannot halve."""
    worker = Worker()
    worker.open_process_group()
    torch.manual_seed(0)
    module: Any = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 5))
    module._no_split_modules = []
    shard(module, RankGroups(ParallelDims(shard=2), torch.device("cpu")).fsdp_mesh, None)
    optimizer, blocks = torch.optim.AdamW(module.parameters(), lr=0.1), HostBlocks()
    with pytest.MonkeyPatch.context() as patch:
        gpu = SimulatedGPU(patch)
        for step in range(2):
            device = GPU if offloads else torch.device("cpu")
            with resident(module, optimizer, OFFLOADS, device, blocks):
                module(torch.full((3, 4), step + worker.rank + 1.0)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                module.reshard()
        pinned = [gpu.is_pinned(local_part(weight.detach())) for weight in module.parameters()]
    weights = [full_tensor(weight).tolist() for weight in module.parameters()]
    return {"weights": weights, "pinned": pinned, "blocks": len(gpu.locked)}


def test_offloaded_sharded_weights_train_like_resident_weights() -> None:
    offloaded, stayed = run_kept(2, sharded_steps, True), run_kept(2, sharded_steps, False)
    for ours, theirs in zip(offloaded, stayed, strict=True):
        assert ours["weights"] == theirs["weights"]
        assert ours["pinned"][:2] == [True, True]  # FSDP pads the others, in memory of its own
        assert (ours["blocks"], theirs["blocks"]) == (2, 0)
