"""Weights in host memory, one version at a time, for deliveries that the trainer does not wait for.

A snapshot is filled between two updates; any number of deliveries read it while the trainer goes
on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from verl_like.errors import WeightSyncError
from workers.weights.channel import Sent, aligned
from workers.weights.checksum import Hashing, NamedTensors, byte_view
from workers.weights.kept import effective_tensors

BUFFER_TIMEOUT_S = 120.0
"""How long a publication waits for a delivery to end whose memory it needs."""


class Memory:
    """Host memory that is filled from its begin, and then again: what is alike lies alike."""

    BLOCK = 2**26
    """Bytes that are taken at once; of one that is filled in part, the rest is not resident."""

    def __init__(self) -> None:
        """Nothing is taken."""
        self._blocks: list[Tensor] = []
        self._block = self._filled = 0

    def begin(self) -> None:
        """Fill it anew."""
        self._block = self._filled = 0

    def take(self, num_bytes: int) -> Place:
        """The next bytes."""
        start = self._filled
        while self._block < len(self._blocks):
            if start + num_bytes <= len(self._blocks[self._block]):
                break
            if start:
                self._block, start = self._block + 1, 0
            else:
                del self._blocks[self._block]
        else:
            self._blocks.append(torch.empty(max(num_bytes, self.BLOCK), dtype=torch.uint8))
        self._filled = start + num_bytes
        return Place(self._blocks[self._block], start, self._filled)


class Place(NamedTuple):
    """Bytes of a block."""

    block: Tensor
    start: int
    end: int

    @property
    def content(self) -> Tensor:
        """The bytes."""
        return self.block[self.start : self.end]

    def follows(self, other: Place) -> bool:
        """Whether it begins where the other one ends."""
        return self.block is other.block and self.start == other.end


class Snapshot:
    """The full weights of one version, with the hash of every tensor.

    They lie behind each other, so that a bucket is a stretch of them: a delivery copies nothing,
    and has next to nothing to do in Python beside the trainer's own work.
    """

    def __init__(self) -> None:
        """Empty: it holds no version."""
        self.version: int | None = None
        self.tensors: dict[str, Tensor] = {}
        self.hashes: dict[str, int] = {}
        self.merging: dict[str, Any] | None = None
        """Where adapters come apart from their base: how they are put together."""
        self.num_readers = 0
        self._memory = Memory()
        self._places: dict[str, Place] = {}

    def fill(
        self,
        version: int,
        tensors: NamedTensors,
        hashing: Hashing,
        merging: dict[str, Any] | None = None,
    ) -> None:
        """Copy these tensors, into the memory of the version before."""
        self.tensors, self.hashes, self._places = {}, {}, {}
        self.version, self.merging = None, merging
        self._memory.begin()
        for name, tensor in tensors:
            source = byte_view(tensor.detach().cpu().contiguous()).numpy()
            self._places[name] = place = self._memory.take(len(source))
            self.hashes[name] = hashing.of_copied(place.content.numpy(), source)
            content = aligned(place.content, tensor.dtype)
            self.tensors[name] = content.view(tensor.dtype).view(tensor.shape)
        self.version = version

    def buckets(self, limit: int) -> Iterator[tuple[list[Sent], Tensor]]:
        """All of it, in pieces of at most so many bytes; a tensor that is larger comes alone."""
        sent: list[Sent] = []
        whole = None
        for name, place in self._places.items():
            tensor = self.tensors[name]
            if whole is not None and place.follows(whole) and place.end - whole.start <= limit:
                whole = whole._replace(end=place.end)
            else:
                if whole is not None:
                    yield sent, whole.content
                sent, whole = [], place
            sent.append((name, str(tensor.dtype), list(tensor.shape), self.hashes[name]))
        if whole is not None:
            yield sent, whole.content

    def effective(self) -> Iterable[tuple[str, Tensor]]:
        """The weights as a rollout has them in the end."""
        if self.merging is None:
            return self.tensors.items()
        return effective_tensors(self.tensors, self.merging)

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())

    def changed_share(self, before: dict[str, int]) -> float:
        """The share of the tensors whose hash is not the one that they had before."""
        changed = [name for name, value in self.hashes.items() if before.get(name) != value]
        return len(changed) / max(1, len(self.hashes))


class Snapshots:
    """Two snapshots that take turns: the newest is kept, and what a delivery is still reading.

    A publication takes the memory of the older one. While a delivery reads that, it takes the
    memory of the newest; while deliveries read both, it waits for one of them to end.
    """

    def __init__(self) -> None:
        """Nothing is published."""
        self._both = Snapshot(), Snapshot()
        self._newest: Snapshot | None = None
        self._is_filling = False
        self._changed = threading.Condition()

    def publish(
        self,
        version: int,
        tensors: NamedTensors,
        hashing: Hashing,
        merging: dict[str, Any] | None = None,
    ) -> float | None:
        """Copy the weights as `version`; the share of tensors that the version before had not.

        None where there was none before, or the version is the same and its weights are others.
        """
        newest = self._newest
        is_next = newest is not None and newest.version != version
        before = dict(newest.hashes) if newest is not None else {}
        target = self._take_turn(version)
        try:
            target.fill(version, tensors, hashing, merging)
            with self._changed:
                self._newest = target
        finally:
            with self._changed:
                self._is_filling = False
                self._changed.notify_all()
        return target.changed_share(before) if is_next else None

    def begin_reading(self, version: int | None = None) -> Snapshot:
        """The snapshot of this version, or the newest; it stays as it is until `end_reading`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._newest is not None or not self._is_filling, BUFFER_TIMEOUT_S
            )
            held = None if self._newest is None else self._newest.version
            if self._newest is None or version not in (held, None):
                is_held = "none is held" if held is None else f"the one that is held is {held}"
                raise WeightSyncError(
                    f"version {version} is not there to be delivered: {is_held}. "
                    "actor.publish_weights(version) makes one, in the place of the one before."
                )
            self._newest.num_readers += 1
            return self._newest

    def end_reading(self, snapshot: Snapshot) -> None:
        """Its memory may be used again, once nobody else reads it."""
        with self._changed:
            snapshot.num_readers -= 1
            self._changed.notify_all()

    @contextmanager
    def reading(self, version: int | None = None) -> Iterator[Snapshot]:
        """Within, the snapshot of this version, or the newest, stays as it is."""
        snapshot = self.begin_reading(version)
        try:
            yield snapshot
        finally:
            self.end_reading(snapshot)

    def _take_turn(self, version: int) -> Snapshot:
        """The snapshot to be overwritten: nobody reads it, nor will until it is filled."""
        with self._changed:
            self._is_filling = True
            if not self._changed.wait_for(self._is_any_free, BUFFER_TIMEOUT_S):
                self._is_filling = False
                reading = " and ".join(str(snapshot.version) for snapshot in self._both)
                raise WeightSyncError(
                    f"version {version} cannot be published: deliveries of versions {reading} have "
                    f"not ended within {BUFFER_TIMEOUT_S:.0f} s. Is a rollout rank stuck?"
                )
            older_first = sorted(self._both, key=lambda snapshot: snapshot is self._newest)
            target = next(snapshot for snapshot in older_first if not snapshot.num_readers)
            if target is self._newest:
                self._newest = None
            return target

    def _is_any_free(self) -> bool:
        return any(not snapshot.num_readers for snapshot in self._both)
