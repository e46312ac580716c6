"""Stand-ins for engines, workers and groups that sync weights; usable in a rank's process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from verl_like.errors import WeightSyncError
from workers.weights.channel import Channel
from workers.weights.full_weights import ModuleWriter, checksum_of
from workers.weights.host_copy import HostCopy
from workers.weights.sync import sync_weights
from workers.weights.transfer import WeightReceiver, WeightSender

CPU = torch.device("cpu")


class TiedModel(nn.Module):
    """Weights of several shapes and dtypes, one of them tied, one of them a scalar."""

    def __init__(self, seed: int, hidden: int = 6) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.embed = nn.Embedding(11, hidden)
        self.layer = nn.Linear(hidden, 300)
        self.head = nn.Linear(hidden, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.zeros(()))
        self.small = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


class PlainTrainer:
    """Stands for a training engine."""

    def __init__(self, seed: int) -> None:
        self.module = self.whole_module = TiedModel(seed)

    def named_full_tensors(
        self,
        on_all_ranks: bool = True,
        dtype: torch.dtype | None = None,
        merged: bool = True,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.module.named_parameters()


class PlainEngine:
    """Stands for a rollout engine with its own copy of the weights."""

    def __init__(self, seed: int) -> None:
        self.module, self.version = TiedModel(seed), None

    def load_weights(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.version = None
        writer = ModuleWriter(self.module)
        for name, tensor in tensors:
            writer.write_tensor(name, tensor)
        writer.verify("engine")

    def commit(self, version: int) -> None:
        self.version = version


class Sender(WeightSender):
    role = "actor"

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.device, self.engine = rank, CPU, PlainTrainer(0)


class Receiver(WeightReceiver):
    role = "rollout"

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size, self.device = rank, world_size, CPU
        self.engine = PlainEngine(10 + rank)


def keeping(rank: int = 0, world_size: int = 1) -> Receiver:
    """Return a receiver that stores the received tensors, next to its engine's weights."""
    worker = Receiver(rank, world_size)
    worker.copy = HostCopy()
    return worker


class Group:
    """A worker group whose ranks are threads of this process."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self.workers, self.world_size = workers, len(workers)
        # concurrent calls have their own threads
        self.pool = ThreadPoolExecutor(4 * len(workers))

    def shares_processes_with(self, other: Any) -> bool:
        return self is other

    def __getattr__(self, name: str) -> Method:
        return Method(self, name)


class InlineGroup(Group):
    """A group of one that runs a call immediately, as the local backend may."""

    def __getattr__(self, name: str) -> Method:
        return InlineMethod(self, name)


class Method:
    def __init__(self, group: Group, name: str) -> None:
        self.group, self.name = group, name

    def __call__(self, *args: Any) -> list[Any]:
        return self.remote(*args).get()

    def remote(self, *args: Any) -> Results:
        return self.on(self.group.workers, args)

    def remote_on(self, rank: int, *args: Any) -> Results:
        return self.on([self.group.workers[rank]], args)

    def on(self, workers: Sequence[Any], args: Sequence[Any]) -> Results:
        submit = self.group.pool.submit
        return Results([submit(getattr(worker, self.name), *args) for worker in workers])


class InlineMethod(Method):
    def on(self, workers: Sequence[Any], args: Sequence[Any]) -> Results:
        results = super().on(workers, args)
        results.get()
        return results


class Results:
    def __init__(self, futures: Sequence[Future[Any]]) -> None:
        self.futures = futures

    def get(self, timeout: float | None = None) -> list[Any]:
        return [future.result(timeout) for future in self.futures]


def checksums(group: Group) -> list[str]:
    return [checksum_of(worker.engine.module.named_parameters()) for worker in group.workers]


def versions(group: Group) -> list[int | None]:
    return [worker.engine.version for worker in group.workers]


def train(actor: Group) -> None:
    with torch.no_grad():
        for worker in actor.workers:
            for i, parameter in enumerate(worker.engine.module.parameters()):
                parameter += 1 + i


def flip_a_bit_on_the_way(patch: pytest.MonkeyPatch) -> None:
    """Flip a bit of a sent weight in every sync."""
    start = Channel._start_broadcast

    def start_flipped(channel: Channel, tensor: torch.Tensor, *group: Any) -> Any:
        if tensor.dtype == torch.uint8 and tensor.numel() > 5000 and channel.rank == 0:
            tensor = tensor.clone()
            tensor[700] ^= 16
        return start(channel, tensor, *group)

    patch.setattr(Channel, "_start_broadcast", start_flipped)


def flip_a_bit_of_text(patch: pytest.MonkeyPatch, text: bytes) -> None:
    """Flip a bit of a header that contains this text in every sync."""
    start = Channel._start_broadcast

    def start_flipped(channel: Channel, tensor: torch.Tensor, *group: Any) -> Any:
        is_bytes = tensor.dtype == torch.uint8
        if channel.rank == 0 and is_bytes and text in tensor.numpy().tobytes():
            tensor = tensor.clone()
            tensor[20] ^= 2
        return start(channel, tensor, *group)

    patch.setattr(Channel, "_start_broadcast", start_flipped)


def assert_rejected(actor: Group, rollout: Group, words: str) -> None:
    """Check that a sync is rejected with this text, and changes no version."""
    with pytest.raises(WeightSyncError, match=words):
        sync_weights(actor, rollout, 5)
    assert versions(rollout) == [None, None]
