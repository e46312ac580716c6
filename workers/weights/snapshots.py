"""Published weights: copies in host memory, which threads deliver while training continues."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from verl_like.errors import WeightSyncError
from workers.weights.channel import Bucket, Manifest, allocate_buffer, fill_buckets
from workers.weights.checksum import NamedTensors, Stopwatch, fetched
from workers.weights.sync import PublishReport


class Snapshot:
    """The full weights of one version in host memory, packed in buckets.

    A delivery sends these buckets without a copy, and so takes little of Python's time from the
    trainer.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self.on_gpu = on_gpu
        """True if the weights come from a GPU."""
        self.version: int | None = None
        self.buckets: list[Bucket] = []
        self.merging: dict[str, Any] | None = None
        """The way in which receivers merge adapters; None if the weights are already merged."""
        self.watch = Stopwatch()
        self._rooms: list[Tensor] = []

    def fill(
        self,
        version: int,
        tensors: NamedTensors,
        bucket_mb: float,
        merging: dict[str, Any] | None = None,
    ) -> None:
        """Replace the contents with copies of these tensors, and reuse the memory.

        Weights of a GPU are hashed there, while the trainer waits. With `merging`, hashes of host
        memory tell which tensors have changed.
        """
        self.version, self.merging, self.watch = version, merging, Stopwatch()
        limit, on_device = int(bucket_mb * 2**20), self.on_gpu and merging is None
        filling = fill_buckets(tensors, limit, self._room, self.watch, False, on_device)
        self.buckets = list(filling)
        if on_device:  # waits for the copies, too
            entries = [entry for bucket in self.buckets for entry in bucket.entries]
            for entry, value in zip(entries, fetched([e[3] for e in entries]), strict=True):
                entry[3] = value
        del self._rooms[len(self.buckets) :]

    def _room(self, number: int, num_bytes: int) -> Tensor:
        """Return the memory of a bucket, reused if it is large enough."""
        if number == len(self._rooms):
            self._rooms.append(allocate_buffer(num_bytes, locked=self.on_gpu))
        elif len(self._rooms[number]) < num_bytes:
            self._rooms[number] = allocate_buffer(num_bytes, locked=self.on_gpu)
        return self._rooms[number][:num_bytes]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors by name, without a copy."""
        for bucket in self.buckets:
            yield from bucket.tensors()

    def manifest(self) -> Manifest:
        """Return the entry of every tensor, by name."""
        return {name: entry for bucket in self.buckets for name, *entry in bucket.entries}


class Snapshots:
    """The newest version, the previous version, and older versions that deliveries still read.

    The next version is written into the memory of the previous one, unless a delivery still reads
    it. So there are two snapshots, plus one for each older version in a slow delivery.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        self.newest: Snapshot | None = None
        self.by_address: dict[str, tuple[Snapshot, Snapshot]] = {}
        """By address of a delivery: its snapshot, and the snapshot before that."""
        self._empty = partial(Snapshot, on_gpu)
        self._previous = self._empty()
        self._lock = threading.Lock()

    def publish(
        self,
        version: int,
        tensors: NamedTensors,
        bucket_mb: float,
        merging: dict[str, Any] | None = None,
    ) -> PublishReport:
        """Copy the weights as `version`, which becomes the newest."""
        before = self.newest
        with self._lock:
            is_read = any(self._previous in pair for pair in self.by_address.values())
            snapshot = self._empty() if is_read else self._previous
            self._previous = self._empty()
        snapshot.fill(version, tensors, bucket_mb, merging)
        with self._lock:
            self._previous, self.newest = before or self._empty(), snapshot
        num_bytes = sum(bucket.num_bytes for bucket in snapshot.buckets)
        return PublishReport(num_bytes, snapshot.watch.seconds)

    def hold(self, version: int | None, address: str) -> Snapshot:
        """Reserve the newest snapshot, which must have this version unless that is None.

        It does not change until `release`.
        """
        with self._lock:
            newest = None if self.newest is None else self.newest.version
            if self.newest is None or version not in (newest, None):
                available = "no version is published"
                if newest is not None:
                    available = f"the published version is {newest}"
                wanted = "the newest version" if version is None else f"version {version}"
                raise WeightSyncError(
                    f"{wanted} cannot be delivered: {available}. Only the newest "
                    "version can be delivered; publish_weights(actor_group, version) publishes it."
                )
            sends_changes = self.newest.merging is not None
            self.by_address[address] = self.newest, self._previous if sends_changes else Snapshot()
            return self.newest

    def release(self, address: str) -> None:
        """End the reservation of this delivery's snapshot, so that its memory can be reused."""
        with self._lock:
            del self.by_address[address]
