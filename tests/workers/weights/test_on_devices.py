"""Weights on a device stay there: torch refuses to copy a tensor from `meta` to host memory."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.stand_ins import Group, Receiver, Sender, checksums, train, versions
from workers.weights import checksum, connection
from workers.weights.sync import sync_weights

DEVICE = torch.device("meta")


class Devices:
    """Stands for GPUs: their groups, broadcasts, and tensors that reached the host."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.sent: list[Tensor] = []
        self.fetched: list[int] = []
        self.numbers = count()

    def form(self, store: Any, rank: int, size: int) -> Devices:
        self.num_groups += 1
        return self

    def broadcast(self, tensors: list[Tensor], options: Any) -> Devices:
        self.sent += tensors
        return self

    def wait(self) -> None:
        pass

    def to_host(self, numbers: Tensor) -> Tensor:
        self.fetched.append(numbers.nbytes)
        return torch.zeros(numbers.shape, dtype=numbers.dtype)


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    devices = Devices()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(connection, "gpu_of", lambda _: f"GPU {next(devices.numbers)}")
    monkeypatch.setattr(connection, "group_of_gpus", devices.form)
    monkeypatch.setattr(checksum, "to_host", devices.to_host)
    return devices


def groups_formed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks that have formed their groups since the fixture started."""
    ranks: list[int] = []
    form = connection.form_groups

    def note(address: Any, store: Any, rank: int, *how: Any) -> Any:
        ranks.append(rank)
        return form(address, store, rank, *how)

    monkeypatch.setattr(connection, "form_groups", note)
    return ranks


def on_device(worker: Any) -> Any:
    worker.device, worker.engine.module = DEVICE, worker.engine.module.to(DEVICE)
    return worker


def test_between_devices_no_weight_is_copied_to_the_host_and_one_group_serves_a_run(
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
def test_a_rank_that_is_new_has_the_groups_formed_again_and_the_others_go_on(
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
