"""What goes wrong with a bucket on its way is caught; where it can, it goes card to card."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.verl_like.calls.threads_of_others import leave_out
from tests.waiting import wait_until
from tests.workers.rollout_engines import beside
from tests.workers.stand_ins import (
    Group,
    Receiver,
    checksums,
    flip_a_bit_on_the_way,
    refused,
    train,
    unconnected,
    versions,
)
from verl_like.calls.progress import AT_LOCK, progress_of_call
from workers.weights import channel as weight_channel
from workers.weights.checksum import Seen, byte_view, hash_of
from workers.weights.sync import WeightReceiver, sync_weights


def test_a_flipped_bit_is_caught_and_no_version_flips(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit_on_the_way(monkeypatch)
    refused(actor, rollout, "rollout rank 0: transfer: 1 corrupt: layer.weight.*rollout rank 1")
    cards_of(monkeypatch, iter(["a/0", "a/1", "b/0"] * 2))
    refused(actor, rollout, "rollout rank 0: transfer: 1 corrupt: layer.weight.*rollout rank 1")


def test_an_engine_is_told_what_was_seen_of_what_has_arrived(actor: Group) -> None:
    told: dict[str, Seen] = {}
    receiver = Receiver()
    load = receiver.engine.load_weights

    def note(tensors: Any, seen: dict[str, Seen]) -> None:
        load(tensors)
        told.update(seen)

    receiver.engine.load_weights = note
    sync_weights(actor, Group([receiver]), 1, bucket_mb=0.001)
    sent = actor.workers[0].engine.module.named_parameters()
    hashes = {name: value for name, (value, _) in told.items()}
    assert hashes == {name: hash_of(byte_view(tensor)) for name, tensor in sent}


def test_a_receiver_whose_sender_does_not_come_is_seen_to_stand_still(
    actor: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, go_on = weight_channel.Channel.send, threading.Event()

    def send_late(channel: Any, *arguments: Any) -> None:
        assert go_on.wait(30)
        send(channel, *arguments)

    monkeypatch.setattr(weight_channel.Channel, "send", send_late)
    receives = WeightReceiver._receive.__code__
    with beside(lambda: sync_weights(actor, Group([Receiver()]), 1)) as synced:
        time.sleep(0.3)
        others = [thread.name for thread in threading.enumerate()]
        leave_out(monkeypatch, *others)
        wait_until(lambda: progress_of_call(1, receives, None).waits == AT_LOCK)
        before = progress_of_call(1, receives, None).wakeups
        time.sleep(0.3)
        assert progress_of_call(1, receives, None).wakeups == before
        go_on.set()
    assert synced[0]["training/weight_version"] == 1.0


def cards_of(monkeypatch: pytest.MonkeyPatch, cards: Any) -> list[int]:
    """Ranks believe that these are their cards; gives the sizes of what travels between cards."""
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

    monkeypatch.setattr(weight_channel, "gpu_of", lambda device: next(cards))
    monkeypatch.setattr(weight_channel, "group_of_gpus", Cards)
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
    assert sum(sizes) == 2 * total


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
    """What the sender makes of its buckets of at most 100 bytes is `change` of them."""
    buckets = weight_channel.Channel._buckets

    def changed(channel: Any, tensors: Any, limit: int, *known: Any) -> Any:
        made = buckets(channel, tensors, 100, *known)
        return iter(change([(held, payload.clone()) for held, payload in made]))

    monkeypatch.setattr(weight_channel.Channel, "_buckets", changed)


def test_a_dropped_bucket_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    buckets_through(monkeypatch, lambda kept: kept[1:])
    refused(actor, rollout, "2 missing: scale, small")


def announced(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """What the sender says that a bucket holds is `change` of it."""
    announce = weight_channel.Channel._start_header
    monkeypatch.setattr(
        weight_channel.Channel,
        "_start_header",
        lambda channel, size, held: announce(channel, size, change(held) if held else held),
    )


def test_a_repeated_bucket_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced(monkeypatch, lambda held: held | {"number": max(held["number"] - 1, 0)})
    buckets_through(monkeypatch, lambda kept: [kept[0], *kept])
    refused(actor, rollout, "bucket 0 in the place of bucket 1")


def test_a_bucket_of_another_size_than_announced_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def longer(kept: Any) -> Any:
        held, payload = kept[0]
        return [(held, torch.cat([payload, payload])), *kept[1:]]

    buckets_through(monkeypatch, longer)
    refused(actor, rollout, "2 missing: scale, small.*bucket 0 of 20 bytes, announced as 10")


def test_buckets_stay_within_their_size_and_two_buffers_serve_all() -> None:
    channel = unconnected()
    tensors = [(f"w{i}", torch.full((7 * i + 1,), float(i))) for i in range(40)]
    seen, sizes = {}, []
    for held, payload in channel._buckets(iter(tensors), 600, {}):
        sizes.append(len(payload))
        pieces = torch.split(payload, [4 * torch.Size(shape).numel() for _, _, shape, _ in held])
        for (name, _, shape, value), piece in zip(held, pieces, strict=True):
            assert hash_of(piece) == value
            seen[name] = piece.clone().view(torch.float32).reshape(shape)
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors)
    assert sum(map(len, channel._buffers)) <= 2 * 600
    assert (
        max(size for size in sizes if size not in {4 * (7 * i + 1) for i in range(22, 40)}) <= 600
    )


def test_a_bucket_out_of_turn_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced(
        monkeypatch, lambda held: held | {"number": 7 if held["number"] == 0 else held["number"]}
    )
    refused(actor, rollout, "bucket 7 in the place of bucket 0")


def test_a_flipped_bit_in_what_a_bucket_is_said_to_hold_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = weight_channel.Channel._start_broadcast

    def flip(channel: Any, tensor: torch.Tensor, *group: Any) -> Any:
        if (
            channel.rank == 0
            and tensor.dtype == torch.uint8
            and b'"layer.bias"' in tensor.numpy().tobytes()
        ):
            tensor = tensor.clone()
            tensor[20] ^= 2
        return start(channel, tensor, *group)

    monkeypatch.setattr(weight_channel.Channel, "_start_broadcast", flip)
    refused(actor, rollout, "5 missing: .*transfer: 1 corrupt: what bucket 0 is said to hold")
