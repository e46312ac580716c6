"""Send weights from the worker of the actor or critic.

A sync sends the current weights, which all ranks gather tensor by tensor. Published weights are a
copy in host memory. Threads deliver this copy to any number of rollouts while the worker continues:
over gloo between host memories, or over NCCL if every rank has its own GPU.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import WeightSyncError
from workers.models.lora import adapter_layout
from workers.models.tensor_files import byte_view
from workers.weights.channel import (
    HOST,
    Bucket,
    Channel,
    Manifest,
    SyncReport,
    allocate_buffer,
    fill_buckets,
)
from workers.weights.checksum import NamedTensors, Stopwatch, fetched, hash_of
from workers.weights.connection import Connections
from workers.weights.host_copy import PREFIX, encode_changes

SentTensors = dict[str, tuple[list[Any], Tensor]]
"""Tensors of an earlier version, each with its entry in the manifest."""


@dataclass(frozen=True)
class PublishReport:
    """The result of publishing on one rank; has default values on ranks that do not send."""

    num_bytes: int = 0
    hash_s: float = 0.0


class _SendingEngine(Protocol):
    whole_module: Any

    def named_full_tensors(
        self, on_all_ranks: bool, dtype: torch.dtype | None, merged: bool
    ) -> Iterator[tuple[str, Tensor]]: ...

    def full_trained_tensors(self) -> Iterator[tuple[str, Tensor]]: ...


class WeightSender:
    """Mixin of workers that send weights: it needs `role`, `rank`, `device` and `engine`.

    sent_dtype       weights are cast to it, if set, before they are hashed and sent
    sends_changed    only changed numbers are sent; adapters are sent apart from their base weights
    sends_adapter    only adapters are sent
    """

    role: str
    rank: int
    device: torch.device
    engine: _SendingEngine
    sent_dtype: torch.dtype | None = None
    sends_changed = False
    sends_adapter = False

    @cached_property
    def connections(self) -> Connections:
        """Connections to the receivers, reused in later syncs."""
        return Connections()

    @cached_property
    def sent(self) -> SentTensors:
        """Host copies of tensors that have changed between syncs, so none of frozen weights."""
        return {}

    @cached_property
    def snapshots(self) -> Snapshots:
        """Published weights. `publish_weights` creates them, in the thread of the role's calls."""
        self.connections.new_address()  # opens the store here, where the role's env variables apply
        return Snapshots(on_gpu=self.device.type == "cuda")

    @cached_property
    def delivery_stream(self) -> torch.cuda.Stream | None:
        """A stream for deliveries, so that updates on the default stream do not wait for them."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_weight_channel(self) -> str | None:
        """Return the address of a sync on rank 0 (`workers.weights.connection`), None on others."""
        return str(self.connections.new_address()) if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def give_up_sync(self, address: str, num_receivers: int) -> None:
        """Release all ranks that wait at this address, because one side of the sync has failed."""
        self.connections.give_up(address, num_receivers)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(
        self, address: str, num_receivers: int, bucket_mb: float, as_trained: bool = False
    ) -> SyncReport:
        """Gather the weights tensor by tensor on all ranks of this role; rank 0 sends them.

        A rollout gets weights in its own dtype. With `as_trained`, for a reference, all weights are
        sent in the dtype of training, with adapters merged.
        """
        limit = int(bucket_mb * 2**20)
        merging = None if as_trained else self._merging()
        with self._full_tensors(as_trained=as_trained) as tensors:
            if self.rank != 0:
                return SyncReport()

            def send(channel: Channel) -> None:
                if merging is None:
                    channel.send(fill_buckets(tensors, limit, channel.room, channel.watch))
                else:
                    send_changes(channel, tensors, limit, merging, self.sent, stores=True)

            return self._send_through(address, num_receivers, self.device, send)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(
        self, version: int, senders: Sequence[int] = (0,), bucket_mb: float = 16.0
    ) -> PublishReport:
        """Copy the weights to host memory on the ranks `senders`, in the rollout's dtype.

        Only the newest version can be delivered. A delivery in progress continues with its own
        version.
        """
        with self._full_tensors(on_all_ranks=list(senders) != [0]) as tensors:
            if self.rank not in senders:
                return PublishReport()
            return self.snapshots.publish(version, tensors, bucket_mb, self._merging())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def open_delivery(self, version: int | None = None) -> tuple[str, int | None]:
        """Reserve a published version for a delivery; return the delivery's address and version.

        The default version is the newest.
        """
        if "snapshots" not in vars(self):
            raise WeightSyncError(
                f"{self.role} rank {self.rank} has published no version of its weights, so it "
                f"cannot deliver any. Call publish_weights({self.role}_group, version, "
                f"senders=[{self.rank}])."
            )
        address = str(self.connections.new_address())
        return address, self.snapshots.hold(version, address).version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def deliver_weights(self, address: str, num_receivers: int) -> SyncReport:
        """Send the version reserved for this address to the receivers that connect.

        If every rank has its own GPU, the weights travel from GPU to GPU. With `sends_changed`,
        the few changed bytes travel through host memory, where the earlier version is.
        """
        snapshot, previous = self.snapshots.by_address[address]
        device = self.device if snapshot.merging is None else HOST

        def send(channel: Channel) -> None:
            if snapshot.merging is None:
                channel.send(snapshot.buckets)
            else:
                limit = max((len(bucket.payload) for bucket in snapshot.buckets), default=1)
                entries = previous.manifest()
                sent = {name: (entries[name], tensor) for name, tensor in previous.tensors()}
                send_changes(channel, snapshot.tensors(), limit, snapshot.merging, sent)

        try:
            with torch.cuda.stream(self.delivery_stream):
                return self._send_through(address, num_receivers, device, send)
        finally:
            self.snapshots.release(address)

    @contextmanager
    def _full_tensors(
        self, *, on_all_ranks: bool = False, as_trained: bool = False
    ) -> Iterator[NamedTensors]:
        """Context with the full weights for a rollout, or `as_trained` for a reference.

        At its end every rank has run all collectives of the gathering, even after an error.
        """
        if self.sends_adapter and not as_trained:
            tensors = self.engine.full_trained_tensors()
        else:
            tensors = self.engine.named_full_tensors(
                on_all_ranks=on_all_ranks,
                dtype=None if as_trained else self.sent_dtype,
                merged=as_trained or not self.sends_changed,
            )
        try:
            yield tensors
        finally:
            deque(tensors, maxlen=0)

    def _merging(self) -> dict[str, Any] | None:
        """Return how receivers merge adapters into base weights; None unless `sends_changed`."""
        if not self.sends_changed:
            return None
        dtype = None if self.sent_dtype is None else str(self.sent_dtype)
        return {"adapters": adapter_layout(self.engine.whole_module), "dtype": dtype}

    def _send_through(
        self,
        address: str,
        num_receivers: int,
        device: torch.device,
        send: Callable[[Channel], None],
    ) -> SyncReport:
        """Connect to the receivers, `send` to them and vote."""
        try:
            with self.connections.sending(address, num_receivers, device) as channel:
                send(channel)
                agreed = channel.all_agree(True)
                if not agreed:
                    channel.connection.manifest = {}
        except WeightSyncError as error:
            return SyncReport(f"{self.role} rank {self.rank}: {error}", voted=False)
        problem = None if agreed else "a receiving rank rejected the weights"
        return SyncReport(problem, channel.num_bytes, channel.watch.seconds)


def send_changes(
    channel: Channel,
    tensors: NamedTensors,
    limit: int,
    merging: Mapping[str, Any],
    sent: SentTensors,
    stores: bool = False,
) -> None:
    """Send the tensors that the receivers do not have, then the manifest of all weights.

    If the receivers have the version of a tensor that `sent` has, only its changed numbers are
    sent. With `stores`, changed tensors are copied into `sent`.
    """
    manifest: Manifest = {}
    received = channel.connection.manifest

    def changed() -> Iterator[tuple[str, Tensor]]:
        for name, weight in tensors:
            tensor = weight.detach().to(channel.device).contiguous()
            with channel.watch.running():
                value = hash_of(byte_view(tensor))
            manifest[name] = [str(tensor.dtype), list(tensor.shape), value]
            if received.get(name) == manifest[name]:
                continue
            entry, old = sent.get(name, ([], tensor))
            changes = None
            if entry and entry == received.get(name) and entry[:2] == manifest[name][:2]:
                changes = encode_changes(old.to(tensor.device), tensor)
            if stores and (name in received or name in sent):
                sent[name] = manifest[name], tensor.to(HOST, copy=True)
            if changes is None:
                yield name, tensor
            else:
                yield PREFIX + name, changes

    summary = {"manifest": manifest, "merging": merging}
    channel.send(fill_buckets(changed(), limit, channel.room, channel.watch), summary)
    channel.connection.manifest = manifest


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
        """How receivers merge adapters; None if the weights are already merged."""
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
                available = (
                    "no version is published"
                    if newest is None
                    else f"the published version is {newest}"
                )
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
