"""Errors of a bucket in transit are detected; GPUs exchange data directly where possible."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.workers.stand_ins import (
    Group,
    checksums,
    flip_a_bit_on_the_way,
    refused,
    train,
    versions,
)
from workers.weights import connection, sender
from workers.weights.channel import ALIGNMENT, Bucket, Channel, Finish, pack
from workers.weights.checksum import Stopwatch, hash_of
from workers.weights.sync import sync_weights


def test_a_flipped_bit_is_caught_and_no_version_flips(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit_on_the_way(monkeypatch)
    refused(actor, rollout, "rollout rank 0: transfer: 1 corrupt: layer.weight.*rollout rank 1")
    cards_of(monkeypatch, iter(["a/0", "a/1", "b/0"] * 2))
    refused(actor, rollout, "rollout rank 0: transfer: 1 corrupt: layer.weight.*rollout rank 1")


def cards_of(monkeypatch: pytest.MonkeyPatch, cards: Any) -> list[int]:
    """Simulate these GPUs; return the sizes of tensors that travel between GPUs."""
    sizes = []

    class Cards:
        def __init__(self, store: Any, rank: int, size: int) -> None:
            self.rank, self.gloo = (
                rank,
                dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20)),
            )

        def broadcast(self, tensors: Any, options: Any) -> Any:
            if self.rank == 0:
                sizes.append(tensors[0].numel())
            return self.gloo.broadcast(tensors, options)

    monkeypatch.setattr(connection, "gpu_of", lambda device: next(cards))
    monkeypatch.setattr(connection, "group_of_gpus", Cards)
    return sizes


def test_buckets_go_from_card_to_card_where_every_rank_has_its_own(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = cards_of(monkeypatch, iter(["a/0", "a/1", "b/0"] * 2))
    for version in range(2):
        train(actor)
        sync_weights(actor, rollout, version, bucket_mb=0.001)
        assert checksums(rollout) == checksums(actor)[:1] * 2
        assert versions(rollout) == [version, version]
    total = sum(p.numel() * p.element_size() for p in actor.workers[0].engine.module.parameters())
    assert len(sizes) > 4
    assert 2 * total <= sum(sizes) <= 2 * total + 4 * ALIGNMENT


@pytest.mark.parametrize(
    "cards", [["a/0", "a/0", "a/1"], ["a/0", "", "a/1"], ["", "a/0", "a/1"], ["", "", ""]]
)
def test_a_shared_card_or_none_leaves_all_to_gloo(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch, cards: Any
) -> None:
    sizes = cards_of(monkeypatch, iter(cards))
    sync_weights(actor, rollout, 1)
    assert checksums(rollout) == checksums(actor)[:1] * 2
    assert not sizes


def buckets_through(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Change the sender's buckets of at most 100 bytes by `change`."""

    def changed(tensors: Any, limit: int, *how: Any) -> Any:
        made = pack(tensors, 100, *how)
        return iter(change([Bucket(each.entries, each.payload.clone()) for each in made]))

    monkeypatch.setattr(sender, "pack", changed)


def test_a_dropped_bucket_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets_through(monkeypatch, lambda kept: kept[1:])
    refused(actor, rollout, "2 missing: scale, small")


def announced(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Change the sender's announcement of a bucket by `change`."""
    announce = Channel._start_header
    monkeypatch.setattr(
        Channel,
        "_start_header",
        lambda channel, size, held: announce(channel, size, change(held) if held else held),
    )


def test_a_repeated_bucket_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced(monkeypatch, lambda held: held | {"number": max(held["number"] - 1, 0)})
    buckets_through(monkeypatch, lambda kept: [kept[0], *kept])
    refused(actor, rollout, "bucket 0 instead of bucket 1")


def test_a_bucket_of_another_size_than_announced_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def longer(kept: Any) -> Any:
        longer = torch.cat([kept[0].payload, kept[0].payload])
        return [Bucket(kept[0].entries, longer), *kept[1:]]

    buckets_through(monkeypatch, longer)
    refused(actor, rollout, "2 missing: scale, small.*bucket 0 of 44 bytes, announced as 22")


def test_buckets_stay_within_their_size_and_two_rooms_serve_all() -> None:
    tensors = [(f"w{i}", torch.full((7 * i + 1,), float(i))) for i in range(40)]
    tensors[3:3] = [("odd", torch.ones(3, dtype=torch.uint8)), ("none", torch.zeros(0, 2))]
    rooms = [torch.empty(600, dtype=torch.uint8) for _ in range(2)]
    seen: dict[str, torch.Tensor] = {}
    for bucket in pack(tensors, 600, lambda number, size: rooms[number % 2][:size], Stopwatch()):
        assert len(bucket.payload) <= 600 or len(bucket.entries) == 1
        for (*_, value), chunk in zip(bucket.entries, bucket.contents(), strict=True):
            assert hash_of(chunk) == value
        seen |= {name: tensor.clone() for name, tensor in bucket.tensors()}
    assert list(seen) == [name for name, _ in tensors]
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors)


def test_a_flipped_bit_in_what_a_bucket_is_said_to_hold_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Channel._start_broadcast

    def flip(channel: Any, tensor: torch.Tensor, *group: Any) -> Finish:
        if (
            channel.rank == 0
            and tensor.dtype == torch.uint8
            and b'"layer.bias"' in tensor.numpy().tobytes()
        ):
            tensor = tensor.clone()
            tensor[20] ^= 2
        return start(channel, tensor, *group)

    monkeypatch.setattr(Channel, "_start_broadcast", flip)
    refused(actor, rollout, "5 missing: .*transfer: 1 corrupt: the header of bucket 0")
