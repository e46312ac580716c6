"""The ranks of a group meet in a store that strangers cannot change."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.verl_like.groups import start
from verl_like import Dispatch, Worker, register
from verl_like.calls.messages import Call
from verl_like.errors import WorkerError
from verl_like.process.host import WorkerHost
from verl_like.process.info import ProcessInfo, new_secret
from verl_like.process.store import open_store
from verl_like.process.worker import construction


class Meeting(Worker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_in_a_group_that_is_made_later(self) -> float:
        self.open_process_group()
        gc.collect()
        value = torch.tensor(float(self.rank + 1))
        dist.all_reduce(value, group=dist.new_group(list(range(self.world_size))))
        return value.item()


def meet(store: dist.TCPStore, secret: str, rank: int, seconds: float = 20.0) -> dist.Store:
    """Open the process group of a rank of two."""
    facts = ProcessInfo(rank=rank, world_size=2, secret=secret, rendezvous_s=seconds)
    with construction(facts, {}):
        worker = Worker()
    return worker._meet("127.0.0.1", store.port)


def names_in(store: dist.TCPStore, count: int) -> list[str]:
    """Return the names that ranks have written, once there are so many."""
    while len(names := [name for name in store.list_keys() if name != "init/"]) < count:
        pass
    return names


def with_stranger(
    seconds: float, act: Callable[[dist.TCPStore, str], None]
) -> tuple[dist.TCPStore, str, Future[dist.Store]]:
    """Let rank 0 wait for rank 1, while a stranger has seen the names that it wrote."""
    server, secret = open_store("127.0.0.1"), new_secret()
    pool = ThreadPoolExecutor(1)
    first = pool.submit(meet, server, secret, 0, seconds)
    pool.shutdown(wait=False)
    (name,) = names_in(server, 1)
    act(dist.TCPStore("127.0.0.1", server.port), name)
    return server, secret, first


def come_as_rank_1(stranger: dist.TCPStore, seen: str) -> None:
    stranger.set(seen.replace("rank 0", "rank 1"), "here")
    for name in ("rank 1", seen.rpartition("/")[0] + "/rank 1"):
        stranger.set(name, "here")


def test_a_stranger_that_lists_names_cannot_replace_a_rank() -> None:
    _, _, first = with_stranger(0.3, come_as_rank_1)
    with pytest.raises(WorkerError, match="rank 0 of 2 waited .* for rank 1 to open"):
        first.result()


def test_ranks_meet_despite_a_stranger_and_do_not_store_the_secret() -> None:
    server, secret, first = with_stranger(
        20.0, lambda stranger, seen: stranger.set(seen, "a stranger's")
    )
    stores: list[Any] = [meet(server, secret, 1), first.result()]
    stores[0].set("address", "here")
    assert stores[1].get("address") == b"here"
    for name in names_in(server, 3):
        assert secret not in name
        assert secret.encode() not in server.get(name)


def test_an_address_overwritten_by_a_stranger_is_rejected() -> None:
    server, secret, first = with_stranger(20.0, lambda *_: None)
    stores: list[Any] = [meet(server, secret, 1), first.result()]
    stores[0].set("address", "here")
    for name in names_in(server, 3):
        server.set(name, "a stranger's address")
    with pytest.raises(WorkerError, match="'address' in the store was not written by a process"):
        stores[1].get("address")


def test_process_groups_can_be_created_later() -> None:
    with start("child", {"meeting": (Meeting, ())}, [2]) as group:
        assert group.sum_in_a_group_that_is_made_later() == [3.0, 3.0]


def on_gpus(**facts: Any) -> Worker:
    """Return a worker that believes it has a GPU, without computing on it."""
    with construction(ProcessInfo(device_kind="cuda", **facts), {}):
        return Worker()


def test_the_collective_timeout_on_gpus_also_covers_later_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limits: list[timedelta] = []
    monkeypatch.setattr(distributed_c10d, "default_pg_timeout", timedelta(minutes=7))
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(
        dist, "init_process_group", lambda *_, timeout, **__: limits.append(timeout)
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    on_gpus(call_s=7200.0, collective_s=90.0).open_process_group()
    assert limits == [timedelta(seconds=90)]
    assert distributed_c10d._get_default_timeout("cpu:gloo,cuda:nccl") == timedelta(seconds=90)


def test_a_worker_keeps_its_device_when_the_visible_gpus_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    worker = on_gpus(local_rank=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert worker.device == torch.device("cuda", 0)
    assert on_gpus(local_rank=1).device == torch.device("cuda", 1)


class FirstContact(Worker):
    """Creates a mesh on GPUs, as a model's ranks do first."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def make_mesh(self) -> tuple[int, ...]:
        self.open_process_group()
        return tuple(init_device_mesh("cuda", (self.world_size,)).shape)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def variables(self) -> tuple[str, str]:
        return os.environ["LOCAL_RANK"], os.environ["RAY_LOCAL_RANK"]


@pytest.fixture
def rank_3_of_8(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[WorkerHost, list[int]]]:
    """A process of eight that sees one GPU, and the devices that it makes current."""
    current: list[int] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(current))
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda device: current.append(getattr(device, "index", device))
    )
    monkeypatch.setattr(Worker, "_meet", lambda *_: FakeStore())  # the other seven are not there
    init_process_group = dist.init_process_group
    monkeypatch.setattr(
        dist, "init_process_group", lambda _, **options: init_process_group("fake", **options)
    )
    # a mesh leaves devices alone under the fake backend
    monkeypatch.setattr(device_mesh, "get_backend", lambda *_: "nccl")
    facts = ProcessInfo(device_kind="cuda", rank=3, local_rank=3, world_size=8, local_world_size=8)
    facts = replace(facts, master=("127.0.0.1", 29500))
    if dist.is_initialized():  # by an earlier test of this process
        dist.destroy_process_group()
    host = WorkerHost({"actor": (FirstContact, (), {})}, facts, workers={})
    assert host.start(("127.0.0.1", 29500)).error is None
    yield host, current
    if dist.is_initialized():
        dist.destroy_process_group()


def test_rank_3_creates_its_mesh_on_its_only_visible_gpu(rank_3_of_8) -> None:
    host, current = rank_3_of_8
    shape, header = host.call(Call("actor", "make_mesh"), ())
    assert header.error is None
    assert shape == (8,)
    assert set(current) == {0}


def test_local_rank_counts_visible_gpus_and_ray_local_rank_processes(
    rank_3_of_8,
) -> None:
    variables, header = rank_3_of_8[0].call(Call("actor", "variables"), ())
    assert header.error is None
    assert variables == ("0", "3")
