"""A snapshot's tensors lie behind each other: its buckets are stretches of its memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from workers.weights.checksum import Hashing, byte_view, hash_of
from workers.weights.snapshot import Memory, Snapshot

BLOCK = 100


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "BLOCK", BLOCK)


def tensors(offset: float = 0.0) -> dict[str, Tensor]:
    """Of several types and sizes: one starts between two elements, one is larger than a block."""
    return {
        "five": torch.arange(5) + offset,
        "odd": torch.full((3,), 7, dtype=torch.uint8),
        "unaligned": torch.randn(2, 3),
        "large": torch.randn(40) + offset,
        "half": torch.randn(6).bfloat16(),
        "scalar": torch.tensor(offset),
        "none": torch.zeros(0),
    }


def filled(snapshot: Snapshot, version: int, weights: dict[str, Tensor]) -> None:
    snapshot.fill(version, weights.items(), Hashing())
    for name, tensor in weights.items():
        held = snapshot.tensors[name]
        assert (held.dtype, held.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(held, tensor)


@pytest.mark.parametrize("limit", [1, 30, 64, 10**6])
def test_buckets_hold_every_tensor_once_as_it_is(limit: int) -> None:
    snapshot, weights = Snapshot(), tensors()
    filled(snapshot, 1, weights)
    found = []
    for sent, payload in snapshot.buckets(limit):
        assert len(payload) <= limit or len([one for one in sent if one[0] != "none"]) == 1
        sizes = [weights[name].nbytes for name, *_ in sent]
        for (name, dtype, shape, value), piece in zip(
            sent, torch.split(payload, sizes), strict=True
        ):
            assert (dtype, shape) == (str(weights[name].dtype), list(weights[name].shape))
            assert torch.equal(piece, byte_view(weights[name].contiguous()))
            assert value == hash_of(piece.contiguous())
            found.append(name)
    assert found == list(weights)


def test_nothing_is_copied_for_a_bucket() -> None:
    snapshot = Snapshot()
    filled(snapshot, 1, tensors())
    blocks = {block.data_ptr(): len(block) for block in snapshot._memory._blocks}
    for _, payload in snapshot.buckets(10**6):
        start = payload.data_ptr()
        assert any(at <= start <= start + len(payload) <= at + size for at, size in blocks.items())


def test_memory_is_used_again_for_the_same_shapes_and_for_others() -> None:
    snapshot = Snapshot()
    filled(snapshot, 1, tensors())
    places = {name: tensor.data_ptr() for name, tensor in snapshot.tensors.items()}
    filled(snapshot, 2, tensors(1.0))
    lies_alike = [name for name in places if snapshot.tensors[name].data_ptr() == places[name]]
    assert set(lies_alike) >= {"five", "odd", "large", "scalar"}  # "unaligned" is a copy

    larger = {name: torch.cat([tensor.flatten()] * 9) for name, tensor in tensors().items()}
    filled(snapshot, 3, larger)
    filled(snapshot, 4, dict(reversed(tensors().items())))
    filled(snapshot, 5, {"only": torch.randn(3)})
    assert [name for sent, _ in snapshot.buckets(10**6) for name, *_ in sent] == ["only"]
