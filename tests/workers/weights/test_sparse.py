"""Only changed numbers are sent, and the receivers' weights equal the sender's in every bit."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.workers.stand_ins import CPU, Group, PlainEngine, Receiver, checksums, keeping
from tests.workers.weights.lossy import LossySender
from tests.workers.weights.test_host_copy import Bring, both_ways, num_bytes
from workers.weights.full_weights import checksum_of
from workers.weights.host_copy import apply_changes, encode_changes
from workers.weights.sync import sync_weights

DTYPES = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn]


class BlockWeights(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"attention": (128, 128), "mlp": (512, 128), "norm": (128,)}.items():
            weight = 0.02 * torch.randn(shape, generator=generator)
            self.register_parameter(name, nn.Parameter(weight.to(dtype)))


class AdamTrainer(LossySender):
    """Trains float32 weights and sends bfloat16."""

    role = "actor"

    def __init__(self) -> None:
        self.rank, self.device, self.engine = 0, CPU, self
        self.module = self.whole_module = BlockWeights(torch.float32)
        self.sends_changed = True
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-6)
        self.generator = torch.Generator().manual_seed(1)

    def named_full_tensors(self, **_: object) -> Iterator[tuple[str, Tensor]]:
        for name, weight in self.module.named_parameters():
            yield name, weight.detach().bfloat16()

    def update(self) -> None:
        for weight in self.module.parameters():
            weight.grad = torch.randn(weight.shape, generator=self.generator)
        self.optimizer.step()


def receiver(rank: int) -> Receiver:
    worker = keeping(rank, 2)
    worker.engine = PlainEngine(0)
    worker.engine.module = BlockWeights(torch.bfloat16)
    return worker


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (255,), (256,), (3, 257), (40, 512)], ids=str)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 1.0])
def test_changes_restore_every_bit(
    dtype: torch.dtype, shape: tuple[int, ...], share: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    old, other = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    is_changed = torch.rand(shape, generator=generator) < share
    new = torch.where(is_changed, other.float(), old.float()).to(dtype)
    new.view(-1)[0] = -0.0
    changes = encode_changes(old, new)
    if changes is None:
        assert share >= 0.2 or old.numel() <= 256
        return
    assert changes.dtype == torch.uint8
    assert len(changes) < new.nbytes
    apply_changes(old, changes)
    assert old.view(torch.uint8).equal(new.view(torch.uint8))


@both_ways
def test_forty_updates_send_three_percent_of_the_bytes(bring: Bring) -> None:
    """Every twentieth sync loses a bucket or meets a new receiver; the sender restarts once."""
    draw = random.Random(0)
    actor, rollout = Group([AdamTrainer()]), Group([receiver(0), receiver(1)])
    whole = num_bytes(bring(actor, rollout, 0))
    sizes = []
    for version in range(1, 41):
        if version == 30:
            trained = actor.workers[0].module.state_dict()
            actor = Group([AdamTrainer()])
            actor.workers[0].module.load_state_dict(trained)
        if version % 20 == 0:
            rank = draw.randrange(3)
            if rank == 2:
                actor.workers[0].drop_next_bucket()
            else:
                rollout.workers[rank] = receiver(rank)

        actor.workers[0].update()
        sizes.append(num_bytes(bring(actor, rollout, version)))
        assert checksums(rollout) == [checksum_of(actor.workers[0].named_full_tensors())] * 2

    sparse = [size for size in sizes if size < whole]
    assert len(sparse) >= 40 - 5  # two faults, a restart, and the first change per sender
    assert sum(sparse) / len(sparse) <= 0.03 * whole


def test_everything_is_sent_again_if_a_receiver_has_a_wrong_base(
    caplog: pytest.LogCaptureFixture,
) -> None:
    actor, rollout = Group([AdamTrainer()]), Group([receiver(0), receiver(1)])
    for version in range(3):
        actor.workers[0].update()
        sync_weights(actor, rollout, version)
    rollout.workers[1].copy.tensors["mlp"][0, 0] += 1
    actor.workers[0].update()
    sync_weights(actor, rollout, 3)
    assert "rollout rank 1: transfer: 1 neither sent nor held: mlp" in caplog.text
    assert checksums(rollout) == [checksum_of(actor.workers[0].named_full_tensors())] * 2
