"""Errors of a bucket in transit are detected; GPUs exchange data directly where possible."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.workers.stand_ins import (
    Group,
    TiedModel,
    assert_rejected,
    checksums,
    flip_a_bit_of_text,
    flip_a_bit_on_the_way,
    train,
    versions,
)
from verl_like.process.store import SignedStore
from workers.weights import channel, connection
from workers.weights.channel import ALIGNMENT, Bucket, Channel, Connection, fill_buckets
from workers.weights.full_weights import CHUNK, Stopwatch, hash_of
from workers.weights.sync import sync_weights


def test_a_flipped_bit_is_caught_and_changes_no_version(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit_on_the_way(monkeypatch)
    assert_rejected(
        actor, rollout, "rollout rank 0: transfer: 1 corrupt: layer.weight.*rollout rank 1"
    )
    simulate_gpus(monkeypatch, iter(["a/0", "a/1", "b/0"] * 2))
    assert_rejected(
        actor, rollout, "rollout rank 0: transfer: 1 corrupt: layer.weight.*rollout rank 1"
    )


def simulate_gpus(monkeypatch: pytest.MonkeyPatch, gpus: Any) -> list[int]:
    """Simulate these GPUs; return the sizes of tensors that travel between GPUs."""
    sizes = []

    class GroupOfGpus:
        def __init__(self, store: Any, rank: int, size: int) -> None:
            self.rank = rank
            self.gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=20))

        def broadcast(self, tensors: Any, options: Any) -> Any:
            if self.rank == 0:
                sizes.append(tensors[0].numel())
            return self.gloo.broadcast(tensors, options)

    monkeypatch.setattr(connection, "gpu_of", lambda device: next(gpus))
    monkeypatch.setattr(connection, "group_of_gpus", GroupOfGpus)
    return sizes


def test_buckets_go_from_gpu_to_gpu_if_every_rank_has_its_own(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = simulate_gpus(monkeypatch, iter(["a/0", "a/1", "b/0"] * 2))
    for version in range(2):
        train(actor)
        sync_weights(actor, rollout, version, bucket_mb=0.001)
        assert checksums(rollout) == checksums(actor)[:1] * 2
        assert versions(rollout) == [version, version]
    total = sum(p.numel() * p.element_size() for p in actor.workers[0].engine.module.parameters())
    assert len(sizes) > 4
    assert 2 * total <= sum(sizes) <= 2 * total + 4 * ALIGNMENT


@pytest.mark.parametrize("gpus", [["a/0", "a/0", "a/1"], ["a/0", "", "a/1"]])
def test_all_buckets_use_gloo_if_ranks_share_a_gpu_or_have_none(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch, gpus: Any
) -> None:
    sizes = simulate_gpus(monkeypatch, iter(gpus))
    sync_weights(actor, rollout, 1)
    assert checksums(rollout) == checksums(actor)[:1] * 2
    assert not sizes


def buckets_through(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any]) -> None:
    """Change the sender's buckets of at most 100 bytes by `change`."""

    def changed(tensors: Any, limit: int, *arguments: Any) -> Any:
        buckets = fill_buckets(tensors, 100, *arguments)
        return iter(change([Bucket(bucket.entries, bucket.payload.clone()) for bucket in buckets]))

    monkeypatch.setattr(channel, "fill_buckets", changed)


def with_double_payload(buckets: list[Bucket]) -> list[Bucket]:
    return [Bucket(buckets[0].entries, buckets[0].payload.repeat(2)), *buckets[1:]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda buckets: buckets[1:], "2 missing: scale, small"),
        (
            with_double_payload,
            "2 missing: scale, small.*bucket 0 of 44 bytes, announced as 22",
        ),
    ],
)
def test_a_dropped_bucket_or_one_of_another_size_is_caught(
    actor: Group,
    rollout: Group,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[..., Any],
    words: str,
) -> None:
    buckets_through(monkeypatch, change)
    assert_rejected(actor, rollout, words)


def test_a_repeated_bucket_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_header = Channel._start_header

    def one_number_lower(channel: Channel, size: int, header: Any) -> Any:
        if header:
            header |= {"number": max(header["number"] - 1, 0)}
        return start_header(channel, size, header)

    monkeypatch.setattr(Channel, "_start_header", one_number_lower)
    buckets_through(monkeypatch, lambda buckets: [buckets[0], *buckets])
    assert_rejected(actor, rollout, "bucket 0 instead of bucket 1")


def buffers_of(size: int) -> Callable[[int, int], torch.Tensor]:
    """Return the buffers of buckets: two, in turn."""
    buffers = [torch.empty(size, dtype=torch.uint8) for _ in range(2)]
    return lambda number, num_bytes: buffers[number % 2][:num_bytes]


def test_buckets_stay_within_their_size_in_two_buffers() -> None:
    tensors = [(f"w{i}", torch.full((7 * i + 1,), float(i))) for i in range(40)]
    tensors[3:3] = [("odd", torch.ones(3, dtype=torch.uint8)), ("none", torch.zeros(0, 2))]
    seen: dict[str, torch.Tensor] = {}
    for bucket in fill_buckets(tensors, 600, buffers_of(600), Stopwatch()):
        assert len(bucket.payload) <= 600 or len(bucket.entries) == 1
        for (*_, value), chunk in zip(bucket.entries, bucket.contents(), strict=True):
            assert hash_of(chunk) == value
        seen |= {name: tensor.clone() for name, tensor in bucket.tensors()}
    assert list(seen) == [name for name, _ in tensors]
    assert all(torch.equal(seen[name], tensor) for name, tensor in tensors)


@pytest.mark.parametrize("limit", [20, 10**6])
def test_a_flipped_bit_at_either_end_of_a_tensor_names_the_tensor(limit: int) -> None:
    weights = dict(TiedModel(0).named_parameters())
    weights["large"] = torch.randn(CHUNK // 4 + 3)
    flipped = []
    unsigned = SignedStore(cast(Any, None), "", "")
    for number, bucket in enumerate(
        fill_buckets(weights.items(), limit, buffers_of(limit), Stopwatch())
    ):
        for (name, *_), chunk in zip(bucket.entries, bucket.contents(), strict=True):
            for byte, bit in [(0, 1), (0, 128), (-1, 1), (-1, 128)]:
                chunk[byte] ^= bit
                arriving = Channel(Connection("", 0, 2, None), unsigned, 1, torch.device("cpu"))
                header = {"number": number, "tensors": bucket.entries}
                list(arriving._verified(number, bucket.payload, header))
                chunk[byte] ^= bit
                assert arriving.corrupt == [name]
            flipped.append(name)
    assert flipped == list(weights)


def test_a_flipped_bit_in_the_header_of_a_bucket_is_caught(
    actor: Group, rollout: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip_a_bit_of_text(monkeypatch, b'"layer.bias"')
    assert_rejected(actor, rollout, "5 missing: .*transfer: 1 corrupt: the header of bucket 0")
