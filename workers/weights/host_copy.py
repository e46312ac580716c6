"""Copies of weights in host memory: a version to deliver, and what a rollout rank has received.

Threads deliver a `Snapshot` of published weights while training continues. A rollout rank has a
`HostCopy` of the received weights, next to the engine's weights. Because of this copy, unchanged
numbers need not be sent again (`rollout.weight_sync=changed`). A LoRA layer is stored as base
weight and factors, of which only the factors change. At each version they are merged with the
stored base weight, so rounding errors do not accumulate.

After an update with a small learning rate, most bfloat16 weights have their old values.
`encode_changes` encodes only the changed numbers: how many there are in each block of 256 numbers
(2 bytes), their positions in the block (1 byte each), and their new bits.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl_like.errors import WeightSyncError
from workers.models.lora import PARTS, merged_weight, shapes_differ
from workers.models.precision import dtype_of
from workers.models.tensor_files import byte_view
from workers.weights.channel import Bucket, Channel, Manifest, allocate_buffer, fill_buckets
from workers.weights.full_weights import (
    HOST,
    NamedTensors,
    Stopwatch,
    as_integers,
    describe_problems,
    hash_of,
    hashes_on_host,
    raise_problems,
)
from workers.weights.sync import PublishReport


class HostCopy:
    """Verified weights that one rank of a rollout has received so far."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.manifest: Manifest = {}
        self.merging: dict[str, Any] = {"adapters": {}, "dtype": None}

    def effective(self, device: torch.device = HOST) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights; adapters are merged into their base weight on this device.

        Merged weights are cast as the actor casts them. `merging` contains "adapters", which has
        scaling and orientation by layer, and "dtype", the dtype of the rollout's weights.
        """
        dtype = dtype_of(self.merging["dtype"]) if self.merging["dtype"] else None
        for name, tensor in self.tensors.items():
            layer, _, part = name.rpartition(".")
            adapter = self.merging["adapters"].get(layer)
            if adapter is None or part not in PARTS:
                yield name, tensor
            elif part == "weight":
                parts = (tensor, self.tensors[f"{layer}.lora_A"], self.tensors[f"{layer}.lora_B"])
                base, a, b = (tensor.to(device) for tensor in parts)
                merged = merged_weight(base, a, b, adapter["scaling"], adapter["transposed"])
                yield name, merged.to(tensor.dtype).to(dtype or tensor.dtype)

    def receive(self, channel: Channel) -> None:
        """Copy the arriving tensors; raise a `WeightSyncError` for missing or corrupt weights.

        After corrupt data, the next sync sends all tensors again.
        """
        updated = []
        for sent_name, tensor in channel.receive():
            name = sent_name.removeprefix(PREFIX)
            self.manifest.pop(name, None)
            stored = self.tensors.get(name)
            if sent_name != name:
                if stored is not None and not channel.corrupt:
                    apply_changes(stored, tensor.to(HOST))
                    updated.append(name)
                continue
            if stored is None or (stored.shape, stored.dtype) != (tensor.shape, tensor.dtype):
                self.tensors[name] = stored = torch.empty_like(tensor, device=HOST)
            stored.copy_(tensor)
        if not channel.summary and not channel.corrupt:
            channel.corrupt.append(
                "the missing summary of all weights. Set the same "
                "actor_rollout_ref.rollout.weight_sync=changed for actor and rollout"
            )
        if channel.corrupt:
            self.manifest = {}
            raise WeightSyncError(describe_problems("transfer", corrupt=channel.corrupt))

        self.manifest |= channel.manifest
        for name in updated:
            tensor = self.tensors[name]
            value = hash_of(byte_view(tensor.to(channel.device)))
            self.manifest[name] = [str(tensor.dtype), list(tensor.shape), value]
        manifest: Manifest = channel.summary["manifest"]
        unsent = [name for name, entry in manifest.items() if self.manifest.get(name) != entry]
        self.manifest = {name: manifest[name] for name in manifest if name not in unsent}
        self.tensors = {name: self.tensors[name] for name in self.manifest}
        raise_problems("transfer", **{"neither sent nor held": unsent})
        self.merging = channel.summary["merging"]
        self._check_adapters()

    def _check_adapters(self) -> None:
        missing, unfit = [], []
        for layer, adapter in self.merging["adapters"].items():
            parts = [f"{layer}.{part}" for part in PARTS]
            absent = [name for name in parts if name not in self.tensors]
            missing += absent
            if absent:
                continue
            base, a, b = (self.tensors[name] for name in parts)
            if shapes_differ(base, a, b, adapter["transposed"]):
                shapes = " + ".join(str(list(tensor.shape)) for tensor in (base, b, a))
                unfit.append(f"{layer} (base, B, A: {shapes})")
        if missing or unfit:
            self.manifest = {}
        raise_problems("adapters", missing=missing, **{"of another shape": unfit})


BLOCK = 256
PREFIX = "changes:"
"""Prefix of a tensor's name if only its changes are sent."""
SentTensors = dict[str, tuple[list[Any], Tensor]]
"""Tensors of an earlier version, each with its entry in the manifest."""


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
        """Yield the tensors whose hash differs from the received one, as changes where possible."""
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


def encode_changes(old: Tensor, new: Tensor) -> Tensor | None:
    """Return the changed numbers as bytes; None if they are not shorter than `new`."""
    words = as_integers(new)
    places = (as_integers(old) != words).nonzero().squeeze(1)
    num_blocks = -(-len(words) // BLOCK)
    if 2 * num_blocks + len(places) * (1 + new.itemsize) >= new.nbytes:
        return None
    counts = torch.bincount(places // BLOCK, minlength=num_blocks).to(torch.int16)
    offsets = (places % BLOCK).to(torch.uint8)
    return torch.cat([byte_view(counts), offsets, byte_view(words[places])])


def apply_changes(tensor: Tensor, changes: Tensor) -> None:
    """Apply the output of `encode_changes` to the old tensor, in place."""
    words = as_integers(tensor)
    num_blocks = -(-len(words) // BLOCK)
    counts = changes[: 2 * num_blocks].clone().view(torch.int16).long()
    total = int(counts.sum())
    offsets, values = changes[2 * num_blocks :].split([total, total * words.itemsize])
    starts = torch.repeat_interleave(torch.arange(0, num_blocks * BLOCK, BLOCK), counts)
    words[starts + offsets] = values.clone().view(words.dtype)


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
            for entry, value in zip(entries, hashes_on_host([e[3] for e in entries]), strict=True):
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
                version_name = "the newest version" if version is None else f"version {version}"
                raise WeightSyncError(
                    f"{version_name} cannot be delivered: {available}. Only the newest "
                    "version can be delivered; publish_weights(actor_group, version) publishes it."
                )
            sends_changes = self.newest.merging is not None
            self.by_address[address] = self.newest, self._previous if sends_changes else Snapshot()
            return self.newest

    def release(self, address: str) -> None:
        """End the reservation of this delivery's snapshot, so that its memory can be reused."""
        with self._lock:
            del self.by_address[address]
