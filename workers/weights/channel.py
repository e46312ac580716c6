"""Send weights in buckets, from one sender to all receivers of a connection.

If every rank has its own GPU, buckets are hashed, sent over NCCL and verified on the GPUs.
Otherwise they are in host memory and travel over gloo. Gloo also carries everything else. The
default process group is not used.

Tensors are sent whole and in their own dtype, in buckets of limited size (a larger tensor gets its
own bucket). A header precedes each bucket. It contains the bucket's size and number, and the name,
dtype, shape and hash of every tensor. It is signed with the secret of this sync, so nobody else can
impersonate the sender. While one bucket is in transfer, the sender gathers the next one, and the
receivers verify and load the previous one. So each side needs memory for two buckets, and a sync
takes hardly longer than its slowest stage.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import WeightSyncError
from verl_like.process.store import SIGNATURE_BYTES, SignedStore
from workers.models.precision import dtype_of
from workers.models.tensor_files import byte_view
from workers.parallel.offload import lock_pages
from workers.weights.full_weights import (
    HOST,
    NamedTensors,
    Stopwatch,
    copy_hashed,
    hash_of,
    hash_on_device,
    hashes_of,
)

TRANSFER_TIMEOUT = timedelta(seconds=120)
"""Time limit of one broadcast, including the gathering of its tensors."""
ALIGNMENT = 16
"""The offset of a tensor in its bucket is a multiple of this, so that any dtype can be read."""
END = -1
"""Sent instead of a bucket's size, after the last bucket."""
Manifest = dict[str, list[Any]]
"""The dtype, shape and hash of tensors, by name."""
AllocateBuffer = Callable[[int, int], Tensor]
"""A function that returns a buffer for a bucket, given the bucket's number and size."""
_LENGTHS = Struct("<qq")
"""The first bytes of a header: the size of the bucket, and the length of the header's JSON."""


@dataclass(frozen=True)
class Bucket:
    """Tensors stored one after the other; `entries` has each one's name, dtype, shape and hash."""

    entries: list[list[Any]]
    payload: Tensor
    hashed_on_device: bool = False
    """True if the hashes are of `hash_on_device`, as receivers on GPUs compute them."""

    def places(self) -> list[tuple[int, int]]:
        """Return the start and end of each tensor's bytes in the payload."""
        spans, end = [], 0
        for _, dtype, shape, _ in self.entries:
            start = aligned(end)
            end = start + torch.Size(shape).numel() * dtype_of(dtype).itemsize
            spans.append((start, end))
        return spans

    def contents(self) -> list[Tensor]:
        """Return the bytes of each tensor."""
        return [self.payload[start:end] for start, end in self.places()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors, without a copy."""
        for (name, dtype, shape, _), content in zip(self.entries, self.contents(), strict=True):
            yield name, content.view(dtype_of(dtype)).view(shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors, without the gaps between them."""
        return sum(end - start for start, end in self.places())


def aligned(place: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-place // ALIGNMENT) * ALIGNMENT


def fill_buckets(
    tensors: NamedTensors,
    limit: int,
    room: AllocateBuffer,
    watch: Stopwatch,
    lends: bool = True,
    hashes_first: bool = False,
) -> Iterator[Bucket]:
    """Copy tensors into buckets of at most `limit` bytes, and hash them.

    A tensor larger than `limit` gets its own bucket. It is not copied if it is on the device of the
    buckets and the caller `lends` its tensors, that is, does not change them during the transfer.

    With `hashes_first`, tensors are hashed on their device before they are copied. Neither waits
    for the device, so the hashes are tensors, and the copies may not have ended.
    """
    number = filled = 0
    entries: list[list[Any]] = []
    memory = room(0, limit)
    for name, tensor in tensors:
        content = byte_view(tensor)
        entry: list[Any] = [name, str(tensor.dtype), list(tensor.shape), None]
        start = aligned(filled)
        if entries and start + len(content) > limit:
            yield _hashed(Bucket(entries, memory[:filled], hashes_first), watch)
            number, filled, start, entries = number + 1, 0, 0, []
            memory = room(number, limit)
        if len(content) > limit and lends and content.device == memory.device:
            with watch.running():
                entry[3] = hash_of(content)
            yield Bucket([entry], content)
            continue
        if len(content) > len(memory):
            memory = room(number, len(content))
        entries.append(entry)
        filled = start + len(content)
        place = memory[start:filled]
        if hashes_first:
            entry[3] = hash_on_device(content)
            place.copy_(content, non_blocking=True)
        elif place.is_cpu and content.is_cpu:
            with watch.running():
                entry[3] = copy_hashed(place, content)
        else:
            place.copy_(content, non_blocking=True)
    if entries:
        yield _hashed(Bucket(entries, memory[:filled], hashes_first), watch)


def _hashed(bucket: Bucket, watch: Stopwatch) -> Bucket:
    """Add the missing hashes: only copies within host memory compute them on the way."""
    unhashed = [place for place, entry in enumerate(bucket.entries) if entry[3] is None]
    if unhashed:
        if bucket.payload.is_cpu:
            torch.cuda.current_stream().synchronize()
        with watch.running():
            contents = bucket.contents()
            hashes = hashes_of([contents[place] for place in unhashed])
        for place, value in zip(unhashed, hashes, strict=True):
            bucket.entries[place][3] = value
    return bucket


@dataclass
class Connection:
    """The groups of one sender (rank 0) and its receivers."""

    place: str
    number: int
    """Number of the sync that created the groups."""
    size: int
    group: Any
    """Gloo group for votes, and for buckets unless there are `gpus`."""
    gpus: Any = None
    """NCCL group, if every rank has its own GPU."""
    manifest: Manifest = field(default_factory=dict)
    """On the sender, for syncs of changes: the tensors that every receiver has."""

    def close(self) -> None:
        """Abort and release the groups in a thread, because gloo waits for pending transfers."""

        def release() -> None:
            if self.gpus is not None:
                self.gpus.abort()  # otherwise a broadcast to a lost rank occupies the GPU
            self.group = self.gpus = None

        threading.Thread(target=release, daemon=True).start()


class Channel:
    """One process's end of the transfer in one sync; rank 0 sends, all others receive."""

    def __init__(
        self, connection: Connection, store: SignedStore, rank: int, device: torch.device
    ) -> None:
        self.connection, self.store, self.rank = connection, store, rank
        self.device = device if connection.gpus is not None else HOST
        """Device of the buckets."""
        self._sign = store.sign
        self.watch = Stopwatch()
        """Measures the time of hashing, including the copies that compute hashes."""
        self.num_bytes = 0
        self.corrupt: list[str] = []
        """Damaged data: tensor names, and descriptions of wrong headers and missing buckets."""
        self.manifest: Manifest = {}
        """The dtype, shape and hash of each received tensor."""
        self.summary: dict[str, Any] = {}
        """The sender's final message; empty unless only changes are sent."""
        self._rooms = [torch.empty(0, dtype=torch.uint8) for _ in range(2)]

    def room(self, number: int, num_bytes: int) -> Tensor:
        """Return one of two alternating buffers, because writing to new memory pages is slow."""
        index = number % 2
        if len(self._rooms[index]) < num_bytes:
            self._rooms[index] = allocate_buffer(num_bytes, self.device)
        return self._rooms[index][:num_bytes]

    def send(self, buckets: Iterable[Bucket], summary: Mapping[str, Any] | None = None) -> None:
        """Broadcast the buckets, then an end marker with the summary, which `buckets` may fill.

        While one bucket is sent, the next one is taken from `buckets`, so the two must not share
        memory.
        """
        num_buckets, pending = 0, list[dist.Work]()
        for number, bucket in enumerate(buckets):
            started = self._start_bucket(number, bucket)
            _wait(pending)
            num_buckets, pending = number + 1, started
        _wait([*pending, *self._start_header(END, {"number": num_buckets, **(summary or {})})])

    def _start_bucket(self, number: int, bucket: Bucket) -> list[dist.Work]:
        """Start sending a bucket.

        Published weights are first copied from host memory to this channel's GPU. If their hashes
        are not of the receivers' kind, they are hashed again.
        """
        if bucket.payload.is_cpu and (bucket.hashed_on_device or self.device.type != "cpu"):
            payload, entries = bucket.payload, bucket.entries
            if self.device.type != "cpu":
                payload = self.room(number, len(bucket.payload))
                payload.copy_(bucket.payload, non_blocking=True)
            if bucket.hashed_on_device != (self.device.type != "cpu"):
                with self.watch.running():
                    hashes = hashes_of(Bucket(entries, payload).contents())
                entries = [[*e[:3], value] for e, value in zip(entries, hashes, strict=True)]
            bucket = Bucket(entries, payload)
        header = {"number": number, "tensors": bucket.entries}
        started = self._start_header(bucket.payload.numel(), header)
        started.append(self._start_broadcast(bucket.payload, self.connection.gpus))
        self.num_bytes += bucket.num_bytes
        return started

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the sender broadcasts; use each before you request the next.

        Damaged data is recorded in `corrupt`.
        """
        number, previous = 0, None
        while True:
            size, header = self._receive_header()
            payload, arriving = None, None
            if size == END and header is None:
                self.corrupt.append("the end marker (wrong signature)")
            if size != END:
                payload = self.room(number, size)
                arriving = self._start_broadcast(payload, self.connection.gpus)
            if previous is not None:
                yield from self._verified(*previous)
            if payload is None or arriving is None:
                header = header or {"number": number}
                sent = header.pop("number")
                if sent != number:
                    self.corrupt.append(f"{number} of {sent} buckets")
                self.summary = header
                return
            _wait([arriving])
            number, previous = number + 1, (number, payload, header)

    def all_agree(self, ok: bool) -> bool:
        """Return True if every rank, including the sender, votes ok."""
        votes = torch.tensor([0 if ok else 1])
        with name_errors("a rank left, or did not vote in time"):
            options = dist.AllreduceOptions()
            options.timeout = TRANSFER_TIMEOUT
            self.connection.group.allreduce([votes], options).wait()
        return int(votes) == 0

    def _verified(
        self, expected: int, payload: Tensor, header: dict[str, Any] | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of one bucket; record in `corrupt` what does not match the header."""
        if header is None:
            self.corrupt.append(f"the header of bucket {expected} (wrong signature)")
            return
        if header["number"] != expected:
            self.corrupt.append(f"bucket {header['number']} instead of bucket {expected}")
        bucket = Bucket(header["tensors"], payload)
        self.manifest |= {name: entry for name, *entry in bucket.entries}
        announced = bucket.places()[-1][1]
        if announced != len(payload):
            self.corrupt.append(
                f"bucket {expected} of {len(payload)} bytes, announced as {announced}"
            )
            return

        self.num_bytes += bucket.num_bytes
        with self.watch.running():
            hashes = hashes_of(bucket.contents())
        for (name, *_, sent), value in zip(bucket.entries, hashes, strict=True):
            if value != sent:
                self.corrupt.append(name)
        yield from bucket.tensors()

    def _start_header(self, size: int, header: dict[str, Any]) -> list[dist.Work]:
        """Start sending the size and the signed header of the next bucket."""
        text = json.dumps(header).encode()
        first = _LENGTHS.pack(size, len(text)) + self._sign(b"%d" % size, text)
        parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (first, text)]
        return [self._start_broadcast(part) for part in parts]

    def _receive_header(self) -> tuple[int, dict[str, Any] | None]:
        """Return the next bucket's size, and its header, or None if the signature is wrong."""
        first = self._received(_LENGTHS.size + SIGNATURE_BYTES)
        size, length = _LENGTHS.unpack(first[: _LENGTHS.size])
        text = self._received(length)
        is_whole = hmac.compare_digest(first[_LENGTHS.size :], self._sign(b"%d" % size, text))
        header: dict[str, Any] | None = json.loads(text) if is_whole else None
        return size, header

    def _received(self, num_bytes: int) -> bytes:
        content = torch.empty(num_bytes, dtype=torch.uint8)
        _wait([self._start_broadcast(content)])
        return content.numpy().tobytes()

    def _start_broadcast(self, tensor: Tensor, group: Any = None) -> dist.Work:
        """Start broadcasting a tensor."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, TRANSFER_TIMEOUT
        with name_errors("a broadcast could not start"):
            work: dist.Work = (group or self.connection.group).broadcast([tensor], options)
        return work


def allocate_buffer(num_bytes: int, device: torch.device = HOST, locked: bool = False) -> Tensor:
    """Allocate memory that goes back to the system when freed, since every sync allocates its own.

    With `locked`, host memory is page-locked; copies from a GPU are then several times as fast.
    """
    from workers.cpu.allocator import free_immediately

    with free_immediately():
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    if locked:
        lock_pages(buffer, buffer)
    return buffer


def _wait(broadcasts: Iterable[dist.Work]) -> None:
    with name_errors("a broadcast was interrupted: a worker died or fell behind"):
        for work in broadcasts:
            work.wait()


@contextmanager
def name_errors(action: str) -> Iterator[None]:
    """Context that turns torch's transport errors into a `WeightSyncError` that names `action`."""
    try:
        yield
    except WeightSyncError:
        raise
    except (RuntimeError, OSError, dist.DistError) as error:
        raise WeightSyncError(f"weight sync: {action}: {str(error).splitlines()[0]}") from error
