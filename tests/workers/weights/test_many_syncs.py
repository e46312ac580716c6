"""Many syncs do not grow a run's memory, threads, descriptors and store."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from tests.workers.distributed import run
from tests.workers.stand_ins import Receiver, Sender

WARM_UP, SYNCS = 30, 130
GROWTH_MB = 3.0
"""Measured: 1.5 in 100 syncs of a process that is new, 0.1 in the last 100 of 320."""


def usage() -> tuple[float, int, int]:
    """Return resident megabytes, threads and open descriptors of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    tasks, descriptors = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return resident / 1024, tasks, descriptors


def many_syncs() -> tuple[float, ...]:
    """Return the growth after the first few syncs, and the keys of the sender's store."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
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
