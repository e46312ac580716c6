"""The memory of a delivery of weights, at either end; and what many syncs leak."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.workers.distributed import run
from tests.workers.stand_ins import Receiver, Sender

NUM_TENSORS = 64
WARM_UP, SYNCS = 30, 130
GROWTH_MB = 3.0
"""Measured: 1.5 in 100 syncs of a process that is new, 0.1 in the last 100 of 320."""


class Wide(nn.Module):
    """64 weights of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(NUM_TENSORS):
            self.register_parameter(f"w{number}", nn.Parameter(torch.rand(2**18)))


def rank_and_store() -> tuple[int, Any]:
    """Return this process's rank and the store of all ranks."""
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    return int(os.environ["RANK"]), store


def peak_of(work: Callable[[], bool]) -> float:
    """Return the peak memory of this process during the call, minus the memory before, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    assert work()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1])


def synced(worker: Any, store: Any, version: int) -> bool:
    """Publish and deliver, or receive and load; return whether all succeeded."""
    if isinstance(worker, Sender):
        worker.publish_weights(version, bucket_mb=2.0)
        address, _ = worker.open_delivery(version)
        store.set(f"address {version}", address)
        return worker.deliver_weights(address, 1).error is None

    report = worker.receive_weights(store.get(f"address {version}").decode(), version)
    return report.error is None and worker.engine.version == version


def memory_of_a_sync() -> float:
    """Return the peak of two syncs in buckets of 2 MB at this rank, after a small one."""
    rank, store = rank_and_store()
    worker: Any = Receiver() if rank else Sender()
    assert synced(worker, store, 0)
    worker.engine.module = Wide()
    return peak_of(lambda: synced(worker, store, 1) and synced(worker, store, 2))


def test_a_delivery_takes_two_buckets_and_two_copies_at_the_sender() -> None:
    sender, receiver = run(2, memory_of_a_sync)
    slack = 4  # what gloo, sockets and headers take, or pages that were there before
    assert receiver < 2 * 2 + slack
    assert sender < 2 * 2 + slack + 2 * NUM_TENSORS
    assert sender > 2 * NUM_TENSORS - slack


def usage() -> tuple[float, int, int]:
    """Return resident megabytes, threads and open descriptors of this process."""
    tasks, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return _status("VmRSS") / 1024, tasks, descriptors


def many_syncs() -> tuple[float, ...]:
    """Return the growth after the first few syncs, and the keys of the sender's store."""
    rank, store = rank_and_store()
    worker = Receiver() if rank else Sender()
    for version in range(SYNCS):
        if rank == 0:
            address = worker.open_weight_channel()
            store.set(f"address {version}", address)
            report = worker.send_weights(address, 1, 1.0)
        else:
            report = worker.receive_weights(store.get(f"address {version}").decode(), version)
        assert report.error is None
        if version == WARM_UP:
            before = usage()
    memory, tasks, descriptors = (now - then for now, then in zip(usage(), before, strict=True))
    num_keys = 0 if rank else worker.connections._own_store[0].num_keys()
    return memory, tasks, descriptors, num_keys


def test_many_syncs_leak_nothing() -> None:
    for memory, tasks, descriptors, num_keys in run(2, many_syncs):
        assert memory < GROWTH_MB
        assert tasks <= 8
        assert descriptors < SYNCS / 10
        assert num_keys == 0
