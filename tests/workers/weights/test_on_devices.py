"""Weights on a device stay there: torch refuses to copy a tensor from `meta` to host memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.workers.stand_ins import Group, Receiver, Sender, checksums, keeping, train, versions
from verl_like.errors import WeightSyncError
from workers.weights import channel, connection, full_weights
from workers.weights.host_copy import Snapshots
from workers.weights.sync import deliver_weights, publish_weights, sync_weights

DEVICE = torch.device("meta")


class Devices:
    """Stands for GPUs: their groups, broadcasts, and tensors that reached the host."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.sent: list[Tensor] = []
        self.fetched: list[int] = []
        self.numbers = count()
        self.aborted = threading.Event()

    def form(self, store: Any, rank: int, size: int) -> Devices:
        self.num_groups += 1
        return self

    def broadcast(self, tensors: list[Tensor], options: Any) -> Devices:
        self.sent += tensors
        return self

    def wait(self) -> None:
        pass

    def abort(self) -> None:
        self.aborted.set()

    def to_host(self, numbers: Tensor) -> Tensor:
        self.fetched.append(numbers.nbytes)
        return torch.zeros(numbers.shape, dtype=numbers.dtype)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(connection, "gpu_of", lambda _: f"GPU {next(devices.numbers)}")
    monkeypatch.setattr(connection, "group_of_gpus", devices.form)
    monkeypatch.setattr(full_weights, "to_host", devices.to_host)
    return devices


def groups_formed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list of the ranks that form their groups from now on."""
    ranks: list[int] = []
    form = connection.form_groups

    def record(address: Any, store: Any, rank: int, *arguments: Any) -> Any:
        ranks.append(rank)
        return form(address, store, rank, *arguments)

    monkeypatch.setattr(connection, "form_groups", record)
    return ranks


def on_device(worker: Any) -> Any:
    worker.device, worker.engine.module = DEVICE, worker.engine.module.to(DEVICE)
    return worker


def test_weights_between_devices_never_reach_the_host_in_a_single_group(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    formed = groups_formed(monkeypatch)
    actor = Group([on_device(Sender())])
    rollout = Group([on_device(Receiver(rank, 2)) for rank in range(2)])
    for version in range(4):
        sync_weights(actor, rollout, version, bucket_mb=0.001)
        assert versions(rollout) == [version] * 2
    assert sorted(formed) == [0, 1, 2], "each rank once"
    assert devices.num_groups == 3
    assert {tensor.device for tensor in devices.sent} == {DEVICE}
    num_tensors = len(list(actor.workers[0].engine.module.parameters()))
    assert sum(devices.fetched) == 4 * 3 * num_tensors * 8, "hashes"


def restarted(group: Group) -> None:
    group.workers = [group.workers[0], Receiver(1, 2)]


def without_groups(group: Group) -> None:
    group.workers[1].connections = connection.Connections()


@pytest.mark.parametrize("lose", [restarted, without_groups])
def test_groups_are_formed_again_after_a_rank_restarts(
    actor: Group,
    rollout: Group,
    monkeypatch: pytest.MonkeyPatch,
    lose: Callable[[Group], None],
) -> None:
    formed = groups_formed(monkeypatch)
    for version in range(4):
        if version == 2:
            lose(rollout)
        train(actor)
        sync_weights(actor, rollout, version)
        assert versions(rollout) == [version] * 2
        assert set(checksums(rollout)) == {checksums(actor)[0]}
    assert sorted(formed) == [0, 0, 1, 1, 2, 2]


def test_published_changes_are_sent_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    def gpu_of(device: torch.device) -> str:
        devices.append(device)
        return ""

    monkeypatch.setattr(connection, "gpu_of", gpu_of)
    sender = Sender()
    sender.device, sender.sends_changed = DEVICE, True
    actor, rollout = Group([sender]), Group([keeping()])
    for version in range(2):
        train(actor)
        publish_weights(actor, version)
        deliver_weights(actor, rollout, version)
        assert checksums(rollout) == checksums(actor)
    assert set(devices) == {torch.device("cpu")}


@pytest.mark.parametrize("from_gpu", [True, False])
def test_a_published_bucket_is_copied_to_the_gpu_with_hashes_of_a_gpu(
    devices: Devices, monkeypatch: pytest.MonkeyPatch, from_gpu: bool
) -> None:
    hashed: list[torch.device] = []

    def hashes_of(pieces: list[Tensor]) -> list[int]:
        hashed.extend(piece.device for piece in pieces)
        return [0] * len(pieces)  # as `Devices.to_host` answers

    monkeypatch.setattr(channel, "hashes_of", hashes_of)
    monkeypatch.setattr(channel, "lock_pages", lambda *_: None)
    sender = Sender()
    sender.device = DEVICE  # its weights have been copied to host memory
    sender.snapshots = Snapshots(on_gpu=from_gpu)
    receiver = on_device(Receiver())
    receiver.engine.module.head.weight = receiver.engine.module.embed.weight  # `to` untied them
    actor, rollout = Group([sender]), Group([receiver])
    publish_weights(actor, 4, bucket_mb=0.001)
    deliver_weights(actor, rollout)
    assert versions(rollout) == [4]
    assert {tensor.device for tensor in devices.sent} == {DEVICE}
    num_tensors = len(list(sender.engine.module.parameters()))
    num_hashers = 1 if from_gpu else 2  # the receiver, and the sender if it has no such hashes
    assert hashed == [DEVICE] * num_hashers * num_tensors


def test_a_group_of_gpus_is_aborted_after_a_failed_transfer(
    devices: Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channel.Channel, "receive", lambda _: iter(()))
    monkeypatch.setattr(channel, "TRANSFER_TIMEOUT", connection.timedelta(seconds=1))
    sender = Sender()
    sender.device = DEVICE
    actor, rollout = Group([sender]), Group([on_device(Receiver())])
    publish_weights(actor, 4)
    with pytest.raises(WeightSyncError):
        deliver_weights(actor, rollout)
    assert devices.aborted.wait(20)


def test_torch_ends_no_process_if_a_rank_of_a_gpu_group_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environments: list[str | None] = []
    most_ctas: list[int] = []

    class ProcessGroupNCCL:
        @staticmethod
        def Options() -> SimpleNamespace:
            return SimpleNamespace(config=SimpleNamespace())

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            most_ctas.append(options.config.max_ctas)
            environments.append(os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING"))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    connection.group_of_gpus(None, 0, 2)
    assert environments == ["2"], "abort the communicator, but not the process"
    assert most_ctas == [4], "the trainer's own communicator runs at the same time"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
