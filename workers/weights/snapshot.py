"""Weights in host memory, one version at a time, for deliveries that the trainer does not wait for.

`workers.weights.delivery.WeightPublisher` fills a snapshot between two updates; any number of
deliveries read it while the trainer goes on.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import WeightSyncError
from workers.weights.checksum import Hashing, NamedTensors, byte_view
from workers.weights.kept import effective_tensors

BUFFER_TIMEOUT_S = 120.0
"""How long a publication waits for a delivery to end whose memory it needs."""


class Snapshot:
    """The full weights of one version, with the hash of every tensor."""

    def __init__(self) -> None:
        """Empty: it holds no version."""
        self.version: int | None = None
        self.tensors: dict[str, Tensor] = {}
        self.hashes: dict[str, int] = {}
        self.merging: dict[str, Any] | None = None
        """Where adapters come apart from their base: how they are put together."""
        self.num_readers = 0

    def fill(
        self,
        version: int,
        tensors: NamedTensors,
        hashing: Hashing,
        merging: dict[str, Any] | None = None,
    ) -> None:
        """Copy these tensors, into the memory of the version before where they have its shapes."""
        before, self.tensors, self.hashes = self.tensors, {}, {}
        self.version, self.merging = None, merging
        for name, tensor in tensors:
            own = before.pop(name, None)
            if own is None or own.shape != tensor.shape or own.dtype != tensor.dtype:
                own = torch.empty(tensor.shape, dtype=tensor.dtype)
            source = byte_view(tensor.detach().cpu().contiguous()).numpy()
            self.hashes[name] = hashing.of_copied(byte_view(own).numpy(), source)
            self.tensors[name] = own
        self.version = version

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
