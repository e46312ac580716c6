"""Features that only Ray has: nodes, actors, references passed from worker to worker."""

from __future__ import annotations

import atexit
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import ObjectLostError

from tests.programs import found_by
from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Adder, Modes
from tests.waiting import wait_until
from verl_like import (
    DataProto,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePool,
    gather,
)
from verl_like.backends.ray import pools
from verl_like.calls.deadlines import Deadlines
from verl_like.errors import PlacementError, WaitTimeoutError, WorkerDiedError, WorkerError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def batch(rows: int, **meta: object) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(rows)}, meta_info=meta)


def drive(group) -> list[DataProto]:
    """The driver code of the next test, which does not know its backend."""
    first = group.noise.remote(batch(7))
    drawn = [first.get(), group.noise(batch(3))]
    group.make_mesh(1).get()
    busy = group.make_mesh(1, seconds=0.8)
    on_mesh = group.on_mesh_later(batch(5))
    assert not busy.done(), "nobody need ask the workers about the mesh"
    busy.get()
    others = [group.same(first), group.echo(batch(5)), group.twice(group.same.remote(batch(1)))]
    drawn.append(on_mesh.get())

    group.make_mesh(2).get()
    of_one_rank = group.on_mesh_later(batch(5))
    passed_on = group.on_mesh_later(of_one_rank)
    return [*drawn, *others, passed_on.get(), of_one_rank.get()]


def test_local_and_ray_agree_bit_for_bit() -> None:
    results = []
    for backend in ("child", "ray"):
        with start(backend, {"modes": (Modes, ())}, [2], seed=11) as group:
            results.append(drive(group))
    for local, on_ray in zip(*results, strict=True):
        assert local.batch.keys() == on_ray.batch.keys()
        assert all(
            torch.equal(local.batch[name], on_ray.batch[name]) for name in local.batch.keys()
        )
        assert local.meta_info == on_ray.meta_info


def test_a_shortage_of_cpus_raises_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pools, "PENDING_S", 0.1)
    hog = RayResourcePool([1], cpus_per_process=15.0, name_prefix="hog")
    hog.bundles()
    pool = RayResourcePool(
        [4], cpus_per_process=1.0, name_prefix="late", deadlines=Deadlines(placement_s=1.0)
    )
    try:
        with pytest.raises(
            WaitTimeoutError,
            match=r"placement of pool late-.* \[4\] processes of 1 CPU each within 1 s",
        ):
            RayWorkerGroup(pool, RayClassWithInitArgs(Adder))
    finally:
        hog.release()
    shortage = r"free: 1 CPU; missing: 3 CPU; held by placement group hog-\w+-0 \(15 CPU\)"
    assert re.search(rf"\[4\] processes of 1 CPU each; {shortage}", caplog.text)
    with pytest.raises(PlacementError, match="room for 0"):
        RayResourcePool([1], cpus_per_process=1.0, labels={"rack": "none"}).bundles()
    with pytest.raises(
        PlacementError,
        match=r"needs 2 processes \(20 CPU each\).* room for 0 in total. Nodes: .*: 16 CPU",
    ):
        RayResourcePool([2], cpus_per_process=20.0).bundles()
    with pytest.raises(PlacementError, match="room for 0"):
        RayResourcePool(
            [1], use_gpu=True, cpus_per_process=1.0, accelerator_type="NoSuchCard"
        ).bundles()
    with pytest.raises(PlacementError, match="needs a RayResourcePool, not ResourcePool"):
        RayWorkerGroup(ResourcePool([1]), RayClassWithInitArgs(Adder))


@pytest.fixture(scope="module")
def adders() -> Iterator[tuple[Any, Any]]:
    """A group of one worker that adds 1, and a group of two that add 10."""
    with (
        start("ray", {"one": (Adder, (1,))}, [1]) as one,
        start("ray", {"two": (Adder, (10,))}, [2]) as two,
    ):
        one.pid(), two.pid()
        yield one, two


@pytest.mark.long
def test_two_pools_run_in_parallel_and_pass_references(adders) -> None:
    first, second = adders
    gather(first.add_slowly(batch(2, seconds=1.0)), second.add_slowly(batch(2, seconds=1.0)))
    calls = [call for group in (first, second) for call in group.transport.take_finished()]
    calls = [call for call in calls if call.method == "add_slowly"]
    assert len(calls) == 3
    assert max(call.start for call in calls) < min(call.end for call in calls)
    future = second.add_slowly(batch(5, seconds=0.5))
    chained = second.add_slowly(second.add_slowly(future))
    assert not future.done(), "handing on a future does not wait for it"
    assert chained.get().batch["x"].tolist() == [30, 31, 32, 33, 34]
    back = first.add_slowly(chained)
    assert back.get().batch["x"].tolist() == [31, 32, 33, 34, 35]


def test_the_headers_of_many_chunks_are_sent_as_one(
    adders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("verl_like.backends.ray.transport.MAX_APART", 1)
    group = adders[1]
    future = group.add_slowly(batch(5, seconds=0.2))
    chained = group.add_slowly(future)
    assert not future.done()
    assert len(future.headers_of_chunks) == 1
    assert chained.get().batch["x"].tolist() == [20, 21, 22, 23, 24]
    failed = group.add_slowly(group.add_slowly(DataProto.from_dict({"x": torch.arange(5)})))
    with pytest.raises(KeyError, match="seconds"):
        failed.get()


def test_groups_share_a_pool_and_pools_split_and_merge() -> None:
    pool = RayResourcePool([3], cpus_per_process=0.5, name_prefix="shared")
    from verl_like import merge_resource_pool, split_resource_pool

    first, second = split_resource_pool(pool, [1, 2])
    assert [p.world_size for p in split_resource_pool(pool, 1)] == [1, 1, 1]
    with pytest.raises(
        PlacementError, match=r"a pool of 3 processes cannot be split into pools of 2"
    ):
        split_resource_pool(pool, 2)
    groups = [
        RayWorkerGroup(p, RayClassWithInitArgs(Adder, amount), name_prefix="part")
        for p, amount in ((first, 1), (second, 2), (merge_resource_pool(first, second), 3))
    ]
    assert [group.world_size for group in groups] == [1, 2, 3]
    assert [g.add_slowly(batch(3, seconds=0.0)).get().batch["x"][0].item() for g in groups] == [
        1,
        2,
        3,
    ]
    assert len({name for g in groups for name in g.transport.names}) == 6
    for group in groups:
        group.shutdown()
        group.shutdown()
    pool.release()


def test_a_pool_has_one_placement_group_per_node() -> None:
    pool = RayResourcePool([2, 3], use_gpu=False, cpus_per_process=0.1, name_prefix="nodes")
    try:
        groups = pool.get_placement_groups()
        assert [len(group.bundle_specs) for group in groups] == [2, 3]
        places = [(groups.index(bundle.group), bundle.index) for bundle in pool.bundles()]
        assert places == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    finally:
        pool.release()


def test_a_lost_result_counts_as_the_death_of_its_worker(
    adders, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(reference: object, **settings: object) -> object:
        raise ObjectLostError("0" * 56, None, "")

    future = adders[0].add_slowly(batch(2, seconds=0.0))
    wait_until(future.done)
    monkeypatch.setattr(ray, "get", lost)
    with pytest.raises(WorkerDiedError, match="the result is lost, probably with its machine"):
        future.get()


def test_a_taken_port_is_reported() -> None:
    pool = RayResourcePool([1], cpus_per_process=0.5)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            WorkerError, match=rf"port {port} of .* cannot be bound .* leave it out"
        ):
            RayWorkerGroup(pool, RayClassWithInitArgs(Adder), master_port=port)
    pool.release()


def test_connect_passes_its_arguments_to_ray_init(monkeypatch: pytest.MonkeyPatch) -> None:

    from verl_like.backends.ray import connect

    given: dict[str, object] = {}
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: given.update(options))
    connect("host:1", "mine", {"env_vars": {"A": "b", "OMP_NUM_THREADS": "2"}}, num_cpus=3)
    assert given["address"] == "host:1"
    assert given["namespace"] == "mine"
    assert given["num_cpus"] == 3
    assert given["runtime_env"]["env_vars"]["A"] == "b"
    assert given["runtime_env"]["env_vars"]["OMP_NUM_THREADS"] == "2"


def test_a_silent_cluster_raises_after_the_connect_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_like.backends.ray import connect

    silent = threading.Event()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **options: silent.wait(10))
    monkeypatch.setattr(atexit, "unregister", lambda function: None)
    with pytest.raises(
        WaitTimeoutError,
        match=r"driver waited 0.2 s \(timeouts.connect_s\) for the Ray cluster at host:1",
    ):
        connect("host:1", deadlines=Deadlines(connect_s=0.2))
    silent.set()


def test_a_signal_interrupts_the_start_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl_like.backends.ray import connect

    silent = threading.Event()

    def start(**options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        silent.wait(30)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt("told to stop")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", start)
    monkeypatch.setattr(atexit, "unregister", lambda function: None)
    before = signal.signal(signal.SIGTERM, stop)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt, match="told to stop"):
            connect("host:1")
    finally:
        signal.signal(signal.SIGTERM, before)
        silent.set()
    assert time.monotonic() - began < 10


@pytest.mark.long
def test_an_uneven_pool_starts_and_a_lost_node_or_low_memory_is_noticed(
    tmp_path: Path, forked_python: Path
) -> None:
    facts = found_by(forked_python, "tests.verl_like.two_node_cluster", tmp_path, limit_s=150)
    assert facts["slots"] == [1, 2]
    assert (
        "needs 4 processes (1 CPU each), but the cluster has room for 3 in total"
        in facts["errors"][0]
    )
    assert "needs 3 processes on one node (3 CPU)" in facts["errors"][1]
    assert facts["custom"] == {
        "bundles": {"0": {"CPU": 0.5, "accel": 2.0}},
        "node": {"accel": 3.0},
        "there": True,
        "uses_loopback": False,  # pools on other nodes have to reach it
    }
    assert facts["ranks"] == [6.0, 6.0, 6.0]
    assert facts["local_ranks"] == ["0", "0", "1"]
    assert facts["nodes"] == [0, 1, 1]
    assert facts["environment"] == ["from runtime_env"] * 3
    assert facts["seconds"] < 15
    assert "faulty.sleeps, faulty rank 1 of 3" in facts["died"]
    assert f"{tmp_path}/faulty-1.log" in facts["died"]
    assert facts["node_failure_cause"][0] is None
    assert "is gone" in facts["node_failure_cause"][1]
    assert facts["noticed_s"] < 15
    for message, method in ((facts["starved"], "takes_memory"), (facts["notes"][0], "sleeps")):
        assert f"greedy.{method}, greedy rank 0 of 1 (pid " in message
        assert f"log {tmp_path}/greedy-0.log): the worker process is gone: " in message
        assert "Ray killed it because its node ran low on memory" in message
        assert "Memory on the node (IP: " in message
        assert "set a higher RAY_memory_usage_threshold" in message
