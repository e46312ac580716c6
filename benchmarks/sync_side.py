"""Measure weight sync for `bench_rollout.py`: a 2-rank FSDP actor sends to an engine in a third
process.

The script prints a JSON line.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

NUM_TENSORS, COLUMNS, ROWS = 25, 1024, 1024  # 25 tensors of 4 MiB
ROUNDS = 121
BUCKET_MB = 16.0


class Weights(nn.Module):
    """A module with 100 MiB of float32 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(
            [nn.Parameter(torch.randn(ROWS, COLUMNS)) for _ in range(NUM_TENSORS)]
        )


class Trainer:
    """Replaces a training engine."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.module = Weights()
        fully_shard(self.module, mesh=init_device_mesh("cpu", (2,)))

    def named_full_tensors(self, on_all_ranks: bool, dtype: Any = None, merged: bool = True) -> Any:
        """Yield the tensors as the training engine gathers them."""
        from workers.parallel.fsdp import tensor_on_first

        assert merged
        assert not on_all_ranks
        for name, parameter in self.module.named_parameters():
            tensor = tensor_on_first(parameter, dist.get_rank() == 0)
            if tensor is not None:
                yield name, tensor


class Engine:
    """Replaces a rollout engine."""

    def __init__(self) -> None:
        self.module = Weights()

    def load_weights(self, tensors: Any) -> None:
        """Load the tensors into the module, and verify them."""
        from workers.weights.module_writer import ModuleWriter

        writer = ModuleWriter(self.module)
        for name, tensor in tensors:
            writer.write_tensor(name, tensor)
        writer.verify("engine")

    def commit(self, version: int) -> None:
        """Do nothing."""


def seconds_of(
    works: dict[str, Callable[[int], Any]], together: Callable[[], Any]
) -> dict[str, list[float]]:
    """Return the wall seconds of each function per round, from when all ranks are ready until all
    end.

    The functions alternate, and the first round is a warm-up. Every other round has the reverse
    order, so that no function always runs after another.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(ROUNDS):
        for name in list(works)[:: -1 if round_ % 2 else 1]:
            together()
            began = time.perf_counter()
            works[name](round_)
            together()
            seconds[name].append(time.perf_counter() - began)
    return {name: values[1:] for name, values in seconds.items()}


def hash_shares(seconds: dict[str, list[float]]) -> list[float]:
    """Return the fraction of a sync that hashes take: median and quartiles."""
    pairs = zip(seconds["sync_s"], seconds["sync_without_hashes_s"], strict=True)
    low, median, high = statistics.quantiles([1 - without / whole for whole, without in pairs], n=4)
    return [median, low, high]


def rank_main(rank: int, port: int, path: str) -> None:
    """Run ranks 0 and 1 as the trainer and rank 2 as the rollout; rank 0 writes the results."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=timedelta(seconds=60))
    group = dist.ProcessGroupGloo(dist.PrefixStore("all", store), rank, 3, timedelta(seconds=60))
    payload = torch.ones(NUM_TENSORS * ROWS * COLUMNS)

    def together() -> None:
        group.allreduce([torch.zeros(1)]).wait()

    def broadcast(_: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        group.broadcast([payload], options).wait()

    syncs = Syncs(rank, store)
    works = {
        "broadcast_s": broadcast,
        "sync_s": syncs.sync,
        "sync_without_hashes_s": syncs.unhashed_sync,
    }
    seconds = seconds_of(works, together)

    if rank == 0:
        results: dict[str, Any] = {
            name: statistics.median(values) for name, values in seconds.items()
        }
        hash_cpu_s = statistics.median(syncs.hashes[1:])
        results |= {"hash_share": hash_shares(seconds), "hash_cpu_s": hash_cpu_s}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(results, file)

    together()
    if rank < 2:
        dist.destroy_process_group()


class Syncs:
    """A rank's part in syncs of weights, with and without hashes."""

    def __init__(self, rank: int, store: dist.TCPStore) -> None:
        self.rank, self.store = rank, store
        self.worker = worker_of(rank, store)
        self.hashes: list[float] = []
        """Seconds of the hashes in each sync that has them."""

    def sync(self, round_: int, key: str = "address") -> None:
        """Run one sync, from the actor to the rollout."""
        if self.rank < 2:
            address = self.worker.open_weight_channel() or ""
            if self.rank == 0:
                self.store.set(f"{key} {round_}", address)
            report = self.worker.send_weights(address, 1, BUCKET_MB)
        else:
            address = self.store.get(f"{key} {round_}").decode()
            report = self.worker.receive_weights(address, round_)
        assert report.error is None, report.error
        self.hashes.append(report.hash_s)

    def unhashed_sync(self, round_: int) -> None:
        """Run one sync in which all hashes are zero."""
        from workers.weights import channel

        whole = channel.copy_hashed, channel.hash_of, channel.hashes_of
        channel.copy_hashed = lambda into, source: int(into.copy_(source).numel() * 0)
        channel.hash_of = lambda payload: 0
        channel.hashes_of = lambda payloads: [0] * len(payloads)
        self.sync(round_, "other address")
        channel.copy_hashed, channel.hash_of, channel.hashes_of = whole
        self.hashes.pop()


def worker_of(rank: int, store: dist.TCPStore) -> Any:
    """Return a rank's worker: a sender, in the process group of the actor, or the receiver."""
    from workers.weights.receiver import WeightReceiver
    from workers.weights.sender import WeightSender

    worker: Any
    if rank < 2:
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("actor", store), rank=rank, world_size=2
        )
        worker = WeightSender()
        worker.role, worker.rank, worker.engine = "actor", rank, Trainer()
    else:
        worker = WeightReceiver()
        worker.role, worker.rank, worker.world_size, worker.engine = "rollout", 0, 1, Engine()
    worker.device = torch.device("cpu")
    return worker


def main() -> None:
    """Measure both syncs, and one broadcast of the same bytes to the same three processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.NamedTemporaryFile() as file:
        mp.spawn(rank_main, (port, file.name), nprocs=3)
        results = json.load(file)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
