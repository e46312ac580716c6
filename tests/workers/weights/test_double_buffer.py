"""A version arrives while its rollout generates with the one before; memory is bounded."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.workers.distributed import run
from tests.workers.prompts import prompt_batch
from tests.workers.samples import make_batch, started, tiny_config
from tests.workers.stand_ins import (
    Group,
    Receiver,
    Sender,
    TiedModel,
    checksums,
    keeping,
    train,
    versions,
)
from verl_like.errors import WeightSyncError
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.weights.delivery import deliver_weights, load_delivered, publish_weights


@pytest.fixture
def maker() -> Group:
    return Group([keeping(takes_changes=False)])


def test_what_arrives_ahead_changes_nothing_until_it_is_loaded(actor: Group, maker: Group) -> None:
    publish_weights(actor, 0)
    deliver_weights(actor, maker, 0)
    for version in range(1, 4):
        before = checksums(maker)
        train(actor)
        publish_weights(actor, version)
        deliver_weights(actor, maker, version, ahead=True)
        assert (checksums(maker), versions(maker)) == (before, [version - 1])
        load_delivered(maker, version)
        assert (checksums(maker), versions(maker)) == (checksums(actor)[:1], [version])


def test_only_the_version_that_has_arrived_is_loaded(actor: Group, maker: Group) -> None:
    publish_weights(actor, 7)
    deliver_weights(actor, maker, 7, ahead=True)
    with pytest.raises(WeightSyncError, match="rollout rank 0: holds version 7, not 8"):
        load_delivered(maker, 8)
    assert versions(maker) == [None]


def test_a_version_that_does_not_arrive_whole_leaves_the_engine_as_it_is(
    actor: Group, maker: Group
) -> None:
    publish_weights(actor, 0)
    deliver_weights(actor, maker, 0)
    before = checksums(maker)
    train(actor)
    publish_weights(actor, 1)
    for bucket in actor.workers[0].snapshots.newest.buckets:
        for fact in bucket.facts:
            fact[3] ^= fact[0] == "small"
    with pytest.raises(WeightSyncError, match="rollout rank 0: transfer: 1 corrupt: small"):
        deliver_weights(actor, maker, 1, ahead=True)
    assert (checksums(maker), versions(maker)) == (before, [0])
    with pytest.raises(WeightSyncError, match="holds version None, not 1"):
        load_delivered(maker, 1)


def test_a_version_without_its_last_bucket_is_not_taken_for_whole_and_comes_once_more(
    actor: Group, maker: Group, caplog: pytest.LogCaptureFixture
) -> None:
    publish_weights(actor, 0)
    actor.drop_next_bucket()
    deliver_weights(actor, maker, 0, ahead=True)
    assert "rollout rank 0: transfer: 1 corrupt: 0 of 1 buckets" in caplog.text
    load_delivered(maker, 0)
    assert (checksums(maker), versions(maker)) == (checksums(actor)[:1], [0])


def test_weights_of_another_shape_leave_the_engine_stale_when_they_are_loaded(
    actor: Group, maker: Group
) -> None:
    actor.workers[0].engine.module.layer.bias = nn.Parameter(torch.zeros(7))
    publish_weights(actor, 0)
    deliver_weights(actor, maker, 0, ahead=True)
    with pytest.raises(WeightSyncError, match=r"rollout rank 0: .*layer.bias \(is \[300\]"):
        load_delivered(maker, 0)
    assert versions(maker) == [None]


def test_a_rollout_without_a_second_buffer_receives_nothing_ahead(actor: Group) -> None:
    publish_weights(actor, 0)
    with pytest.raises(WeightSyncError, match="double_buffer=true"):
        Receiver().receive_ahead("127.0.0.1:1/1", 0)


@pytest.mark.parametrize("sync", ["full", "changed"])
def test_a_generation_keeps_its_weights_while_newer_ones_arrive(
    one_layer_dir: Path, sync: str
) -> None:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=8)
    config.actor_rollout_ref.rollout.double_buffer = True
    config.actor_rollout_ref.rollout.sync = sync
    actor = Group([started(ActorWorker, config, 10)])
    maker = Group([started(RolloutWorker, config)])
    publish_weights(actor, 0)
    deliver_weights(actor, maker, 0)
    alone = maker.generate_sequences(prompt_batch(4))[0]

    actor.update_actor(make_batch(8))
    publish_weights(actor, 1)
    generation = maker.generate_sequences.remote(prompt_batch(4))
    deliver_weights(actor, maker, 1, ahead=True)
    beside = generation.get()[0]
    for name in ("responses", "rollout_log_probs", "policy_version"):
        assert torch.equal(beside.batch[name], alone.batch[name])

    load_delivered(maker, 1)
    assert maker.weights_checksum() == actor.published_checksum(1) == actor.weights_checksum(True)
    after = maker.generate_sequences(prompt_batch(4))[0]
    assert [*alone.batch["policy_version"], *after.batch["policy_version"]] == [0] * 4 + [1] * 4


def two_ranks_load_what_arrived() -> list[Any]:
    """Rank 0 sends two versions to ranks 1 and 2; one of these cannot load the second one."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    if rank == 0:
        sender = Sender()
        for version in range(2):
            sender.publish_weights(version)
            address, _ = sender.open_delivery(version) or ("", None)
            store.set(f"address {version}", address)
            assert sender.deliver_weights(address, 2).error is None
        return []

    own = dist.PrefixStore("rollout", store)
    dist.init_process_group("gloo", store=own, rank=rank - 1, world_size=2)
    maker, found = keeping(False, rank - 1, 2), []
    for version in range(2):
        report = maker.receive_ahead(store.get(f"address {version}").decode(), version)
        assert report.error is None
        if (rank, version) == (2, 1):
            maker.engine.module = TiedModel(0, hidden=7)
        error = maker.load_received(version).error
        found.append((error and error[:31], maker.engine.version))
    return found


def test_one_rank_that_cannot_load_what_arrived_keeps_all_from_flipping() -> None:
    _, first, second = run(3, two_ranks_load_what_arrived)
    assert first == [(None, 0), (None, None)]
    assert second == [(None, 0), ("rollout rank 1: engine: 2 of an", None)]


# ------------------------------------------------------------------------------------------ memory

MB, NUM_TENSORS = 2**20, 64


class Wide(nn.Module):
    """64 weights of 1 MiB each."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(NUM_TENSORS):
            self.register_parameter(f"w{number}", nn.Parameter(torch.rand(2**18)))


def peak_of(work: Callable[[], bool]) -> float:
    """The most memory that this process had while it did that, beyond what it had before, in MB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    assert work()
    return (_status("VmHWM") - before) / 1024


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1])


def synced(worker: Any, store: Any, version: int) -> bool:
    """Publish and deliver, or receive and load; whether all went well."""
    if isinstance(worker, Sender):
        worker.publish_weights(version, bucket_mb=2.0)
        address, _ = worker.open_delivery(version) or ("", None)
        store.set(f"address {version}", address)
        return worker.deliver_weights(address, 1).error is None

    doubles = worker.copy is not None
    receive = worker.receive_ahead if doubles else worker.receive_weights
    report = receive(store.get(f"address {version}").decode(), version)
    if doubles:
        worker.load_received(version)
    return report.error is None and worker.engine.version == version


def memory_of_a_sync(doubles: bool) -> float:
    """Two syncs in buckets of 2 MB; the peak of both at this rank, after one of a few bytes."""
    rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
    receiver = keeping(takes_changes=False) if doubles else Receiver()
    worker: Any = receiver if rank else Sender()
    assert synced(worker, store, 0)
    worker.engine.module = Wide()
    return peak_of(lambda: synced(worker, store, 1) and synced(worker, store, 2))


@pytest.mark.parametrize("doubles", [False, True])
def test_a_sync_takes_two_buckets_and_a_second_buffer_one_copy_of_the_weights(
    doubles: bool,
) -> None:
    sender, receiver = run(2, memory_of_a_sync, doubles)
    slack = 4  # what gloo, sockets and headers take
    assert receiver < 2 * 2 + slack + (NUM_TENSORS if doubles else 0)
    assert sender < 2 * 2 + slack + 2 * NUM_TENSORS
    assert sender > 2 * NUM_TENSORS
