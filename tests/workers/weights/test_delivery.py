"""A published version reaches every rollout, whatever the actor does meanwhile."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.verl_like.groups import start
from tests.workers.stand_ins import (
    Group,
    PlainEngine,
    PlainTrainer,
    Receiver,
    checksums,
    train,
    versions,
)
from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import WeightSyncError
from verl_like.process.worker import Worker
from workers.models.tensor_files import byte_view
from workers.weights import channel, full_weights
from workers.weights.full_weights import checksum_of
from workers.weights.host_copy import Snapshot, Snapshots
from workers.weights.sync import SyncReport, deliver_weights, publish_weights, sync_weights
from workers.weights.transfer import WeightReceiver, WeightSender


def test_a_sync_during_a_delivery_disturbs_neither(actor: Group) -> None:
    publish_weights(actor, 1)
    published = checksums(actor)[0]
    train(actor)
    late, synced = Group([Receiver()]), Group([Receiver()])
    address, _ = actor.open_delivery.remote_on(0, 1).get()[0]
    sync_weights(actor, synced, 2)
    delivered = actor.deliver_weights.remote_on(0, address, 1)
    assert late.receive_weights(address, 1)[0].error is None
    assert delivered.get()[0].error is None
    assert checksums(late) == [published]
    assert checksums(synced) == checksums(actor)[:1]


def test_only_the_published_version_can_be_delivered(actor: Group, rollout: Group) -> None:
    with pytest.raises(WeightSyncError, match="actor rank 0 has published no version of its"):
        deliver_weights(actor, rollout, 1)
    for version in (1, 2):
        publish_weights(actor, version)
    with pytest.raises(
        WeightSyncError, match="version 1 cannot be delivered: the published version is 2"
    ):
        deliver_weights(actor, rollout, 1)
    assert versions(rollout) == [None, None]
    assert deliver_weights(actor, rollout)["training/weight_version"] == 2.0
    assert versions(rollout) == [2, 2]


def test_generators_get_their_weights_from_different_ranks(
    actor: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(actor)
    publish_weights(actor, 4, senders=[0, 1])
    generators = [Group([Receiver()]), Group([Receiver()])]
    for sender, generator in enumerate(generators):
        other = actor.workers[1 - sender]
        with monkeypatch.context() as patch:
            for method in ("open_delivery", "deliver_weights"):
                patch.setattr(other, method, None, raising=False)  # nobody but the sender is asked
            deliver_weights(actor, generator, 4, sender=sender)
        assert checksums(generator) == checksums(actor)[:1]


@pytest.mark.parametrize("senders", [[0, 2], []])
def test_publishing_by_ranks_that_do_not_exist_raises(actor: Group, senders: list[int]) -> None:
    with pytest.raises(
        WeightSyncError, match=r"by ranks \[.*\]. Name at least one of the actor's ranks"
    ):
        publish_weights(actor, 1, senders)


def test_a_delivery_succeeds_after_a_rejected_one(actor: Group, rollout: Group) -> None:
    layer = actor.workers[0].engine.module.layer
    bias = layer.bias
    layer.bias = torch.nn.Parameter(torch.zeros(7))
    publish_weights(actor, 1)
    words = r"version 1 was not applied: rollout rank 0.*of another shape: layer.bias.*rejected"
    with pytest.raises(WeightSyncError, match=words):
        deliver_weights(actor, rollout, 1)
    assert versions(rollout) == [None, None]
    layer.bias = bias
    publish_weights(actor, 2)
    deliver_weights(actor, rollout, 2)
    assert versions(rollout) == [2, 2]


# ------------------------------------------------------------------------------------- snapshots


def filled(value: float) -> list[tuple[str, torch.Tensor]]:
    return [("weight", torch.full((4,), value)), ("scalar", torch.tensor(value))]


def test_a_snapshot_is_unchanged_while_it_is_read_and_memory_is_reused() -> None:
    snapshots, addresses = Snapshots(), []
    snapshots.publish(0, filled(0.0), 1.0)
    old = dict(snapshots.hold(0, "a delivery").tensors())
    for version in range(1, 6):
        snapshots.publish(version, filled(float(version)), 1.0)
        new = dict(snapshots.hold(version, "another").tensors())
        assert new["weight"].tolist() == [version] * 4
        addresses.append(new["weight"].data_ptr())
        snapshots.release("another")
    assert old["weight"].tolist() == [0.0] * 4
    assert old["weight"].data_ptr() not in addresses
    assert len(set(addresses)) == 2


@pytest.mark.parametrize("limit_mb", [1e-6, 5e-5, 1.0])
def test_a_snapshot_equals_its_tensors_and_reuses_its_memory(limit_mb: float) -> None:
    def tensors(offset: float) -> dict[str, torch.Tensor]:
        return {
            "five": torch.arange(5) + offset,
            "odd": torch.full((3,), 7, dtype=torch.uint8),
            "after odd": torch.randn(2, 3),
            "large": torch.randn(40) + offset,
            "half": torch.randn(6).bfloat16(),
            "scalar": torch.tensor(offset),
            "none": torch.zeros(0),
        }

    snapshot, addresses = Snapshot(), []
    for version, weights in enumerate([tensors(0.0), tensors(1.0), dict(filled(3.0))]):
        snapshot.fill(version, weights.items(), limit_mb)
        copies = dict(snapshot.tensors())
        assert list(copies) == list(weights)
        for name, tensor in weights.items():
            assert copies[name].dtype == tensor.dtype
            assert torch.equal(copies[name], tensor)
        addresses.append({name: tensor.data_ptr() for name, tensor in copies.items()})
    assert addresses[0] == addresses[1]


def test_weights_of_a_gpu_are_copied_into_page_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked: list[int] = []
    monkeypatch.setattr(channel, "lock_pages", lambda owner, block: locked.append(block.data_ptr()))
    snapshots = Snapshots(on_gpu=True)
    for version in range(4):
        snapshots.publish(version, filled(float(version)), 1.0)
    buffers = [snapshots.newest.buckets[0].payload, snapshots._previous.buckets[0].payload]
    assert sorted(locked) == sorted(buffer.data_ptr() for buffer in buffers)


DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
        ],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_published_weights_of_a_gpu_are_hashed_there_and_fetched_once(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    fetches: list[int] = []
    if device == "cpu":
        monkeypatch.setattr(channel, "lock_pages", lambda *_: None)

    def to_host(numbers: torch.Tensor) -> torch.Tensor:
        fetches.append(len(numbers))
        return numbers.cpu()

    monkeypatch.setattr(full_weights, "to_host", to_host)
    weights = {"a": torch.randn(300, 7), "none": torch.zeros(0), "b": torch.randn(5).bfloat16()}
    snapshot = Snapshot(on_gpu=True)
    snapshot.fill(0, ((name, tensor.to(device)) for name, tensor in weights.items()), 1e-6)
    assert fetches == [3], "no bucket waits for the device"
    for (name, copy), (_, _, value) in zip(
        snapshot.tensors(), snapshot.manifest().values(), strict=True
    ):
        assert torch.equal(copy, weights[name])
        assert value == int(full_weights.hash_on_device(byte_view(weights[name])))
    changes = Snapshot(on_gpu=True)
    changes.fill(0, weights.items(), 1.0, merging={})
    on_cpu = Snapshot()
    on_cpu.fill(0, weights.items(), 1.0)
    assert changes.manifest() == on_cpu.manifest(), "changed numbers are found in host memory"


def test_weights_of_a_gpu_reach_a_host_with_hashes_of_host_memory(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel, "lock_pages", lambda *_: None)
    actor.workers[0].snapshots = Snapshots(on_gpu=True)
    for version in range(2):
        train(actor)
        publish_weights(actor, version)
        deliver_weights(actor, rollout, version)
        assert versions(rollout) == [version] * 2
        assert set(checksums(rollout)) == {checksums(actor)[0]}


# ----------------------------------------------------------------------------------- in processes


class Summed:
    """Mixed into a worker: the checksum of its weights."""

    engine: Any

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_checksum(self) -> str:
        return checksum_of(self.engine.module.named_parameters())


class Trainer(Summed, WeightSender, Worker):
    """Learns by adding a number to every weight."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainTrainer(0)
        self.sent = threading.Semaphore(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def learn(self, num_deliveries: int) -> bool:
        """Update until so many deliveries have ended; return whether they have."""
        train(Group([self]))
        return all(self.sent.acquire(timeout=30) for _ in range(num_deliveries))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def deliver_weights(self, *args: Any) -> SyncReport:
        report = super().deliver_weights(*args)
        self.sent.release()
        return report


class Generator(Summed, WeightReceiver, Worker):
    """Stores weights."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainEngine(10 + self.rank)


@pytest.mark.parametrize("backend", [pytest.param("ray", marks=pytest.mark.ray), "local"])
def test_two_generators_get_the_published_version_while_the_actor_trains(
    backend: str, request: pytest.FixtureRequest
) -> None:
    """With the local backend the trainer is in this process; generators are child processes."""
    if backend == "ray":
        request.getfixturevalue("ray_session")
    with ExitStack() as stack:
        roles = {"trainer": Trainer, "generator": Generator, "generator_1": Generator}
        trainer, *generators = (
            stack.enter_context(
                start(backend, {role: (cls, ())}, [1 if backend == "ray" or cls is Trainer else 2])
            )
            for role, cls in roles.items()
        )
        seen = set()
        for version in range(3):
            published = trainer.weights_checksum()[0]
            publish_weights(trainer, version)
            with ThreadPoolExecutor(2) as threads:
                deliveries = [
                    threads.submit(deliver_weights, trainer, generator, version)
                    for generator in generators
                ]
                assert trainer.learn(2).get() == [True]
                for under_way in deliveries:
                    assert under_way.result()["training/weight_version"] == version
            for generator in generators:
                assert set(generator.weights_checksum()) == {published}
            seen.add(published)
        assert len(seen) == 3
