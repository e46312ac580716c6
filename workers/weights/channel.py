"""Weights between processes that do not share them: a private group of one sender and receivers.

What is agreed on travels over gloo, and so do the buckets, unless every rank has a GPU of its own:
then they go from GPU to GPU over nccl, and gloo carries the rest. The default process group is not
touched.

A channel lasts for one sync: a restarted engine simply joins the next one. Only the store that they
meet on stays. Tensors travel whole in buckets of at most `bucket_mb` (one that is larger alone), as
they are: no cast. A header goes ahead of each bucket: its size and number, and of every tensor
name, dtype, shape and a 64-bit hash, taken while the bytes are copied into the bucket. It is signed
with the secret of this sync, so nobody else can take the sender's place.

While one bucket travels, the sender gathers the next and the receivers verify and write the one
before: each side holds two buckets, and a sync takes hardly longer than its slowest part.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.process.store import SIGNATURE_BYTES, SignedStore
from workers.weights.checksum import Hashing, NamedTensors, Seen, byte_view
from workers.weights.meeting import (
    TRANSFER_TIMEOUT,
    explained,
    formed,
    gloo_options,
    gpu_of,
    group_of_gpus,
    meet,
)

END = -1
"""In the place of a bucket's size: there are no more."""
Sent = tuple[str, str, list[int], int]
"""Name, dtype, shape and hash of a tensor."""
Manifest = dict[str, list[Any]]
"""Of every tensor, by name: dtype, shape and hash."""
Finish = Callable[[], None]
"""Waits until something that has begun is done."""
_LENGTHS = Struct("<qq")
"""The first bytes of a header: the sizes of its bucket and of its text."""
CLOSING = "weight channel's end"
"""The name of the threads in which a channel's groups end."""


@dataclass(frozen=True)
class Changes:
    """A sync of what has changed: what the receivers hold, and how the whole is put together."""

    held: Manifest
    merging: dict[str, Any]


class Channel:
    """This process's end; rank 0 sends, ranks 1..num_receivers receive."""

    def __init__(
        self, store: SignedStore, rank: int, num_receivers: int, device: torch.device
    ) -> None:
        self.rank, self.device = rank, device
        self._sign = store.sign
        self.corrupt: list[str] = []
        self.num_bytes = 0
        self.manifest: Manifest = {}
        """Of what the sender has, and of what has arrived."""
        self.summary: dict[str, Any] = {}
        """Of the whole, where parts of it are held already: its manifest, and how to merge it."""
        self.hashing = Hashing()
        self.seen: dict[str, Seen] = {}
        """Of the tensors that have arrived, as they arrived."""
        self.drops_first = False
        """The first bucket gets lost: a fault on purpose."""
        self._buffers = [_room_for(0) for _ in range(2)]
        size = num_receivers + 1
        has_own_gpus = meet(store, rank, num_receivers, gpu_of(device))
        with explained("the group of sender and receivers did not form"):
            own_store = dist.PrefixStore("weights", store)
            options = gloo_options(store.host)
            form = partial(dist.ProcessGroupGloo, own_store, rank, size, options)
            self._group = formed(form, store)
            self._gpu_group: Any = None
            if has_own_gpus:
                self._gpu_group = group_of_gpus(store.unsigned("gpus"), rank, size)

    def send(
        self,
        tensors: NamedTensors,
        bucket_mb: float,
        hashes: Mapping[str, int] | None = None,
        changes: Changes | None = None,
    ) -> None:
        """Broadcast all tensors; a tensor larger than a bucket travels alone, from where it is.

        Their `hashes` are taken on the way unless they are given, by name. Of `changes` those are
        left out that every receiver holds.
        """
        held = None if changes is None else changes.held
        buckets = self._buckets(tensors, int(bucket_mb * 2**20), hashes or {}, held)
        self.send_buckets(buckets, changes)

    def send_buckets(
        self, buckets: Iterable[tuple[list[Sent], Tensor]], changes: Changes | None = None
    ) -> None:
        """Broadcast what these hold; each payload must stay as it is until the next but one."""
        num_buckets, before = 0, list[Finish]()
        for number, (sent, payload) in enumerate(buckets):
            num_buckets += 1
            if number == 0 and self.drops_first:
                continue
            begun = self._start_header(payload.numel(), {"number": number, "tensors": sent})
            begun.append(self._start_bucket(payload))
            self.num_bytes += payload.numel()
            _finish(before)
            before = begun
        whole: dict[str, Any] = {}
        if changes is not None:
            whole = {"manifest": self.manifest, "merging": changes.merging}
        _finish([*before, *self._start_header(END, {"number": num_buckets, **whole})])

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What the sender broadcasts, tensor by tensor, each valid until the next.

        Damage is noted in `corrupt`.
        """
        number, before = 0, None
        while True:
            size, header = self._receive_header()
            payload, finish = None, None
            if size == END and header is None:
                self.corrupt.append("what is said to be the end")
            if size != END:
                payload = self._room(number % 2, size)
                finish = self._start_bucket(payload)
            if before is not None:
                yield from self._verified(*before)
            if payload is None or finish is None:
                self._end(header or {"number": number}, number)
                return
            finish()
            self.num_bytes += size
            number, before = number + 1, (number, payload, header)

    def _end(self, header: dict[str, Any], num_buckets: int) -> None:
        """The last header: how many buckets there were, and the summary of the whole."""
        sent = header.pop("number")
        if sent != num_buckets:
            self.corrupt.append(f"{num_buckets} of {sent} buckets")
        self.summary = header

    def _verified(
        self, expected: int, payload: Tensor, header: dict[str, Any] | None
    ) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one bucket, from its bytes and its header."""
        if header is None:
            self.corrupt.append(f"what bucket {expected} is said to hold")
            return
        if header["number"] != expected:
            self.corrupt.append(f"bucket {header['number']} in the place of bucket {expected}")

        self.manifest |= {name: fact for name, *fact in header["tensors"]}
        tensors = [
            (name, dtype_of(dtype), shape, value) for name, dtype, shape, value in header["tensors"]
        ]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape, _ in tensors]
        if sum(sizes) != payload.numel():
            self.corrupt.append(
                f"bucket {expected} of {payload.numel()} bytes, announced as {sum(sizes)}"
            )
            return

        pieces = torch.split(payload, sizes)
        dtypes = [dtype for _, dtype, _, _ in tensors]
        found = self.hashing.of_pieces(payload, list(zip(sizes, dtypes, strict=True)))
        for (name, dtype, shape, value), piece, seen in zip(tensors, pieces, found, strict=True):
            self.seen[name] = seen
            if seen[0] != value:
                self.corrupt.append(name)
            yield name, aligned(piece, dtype).view(dtype).reshape(shape)

    def close(self) -> None:
        """Let go of the groups, in a thread of its own: gloo takes 20 ms to stop its threads."""
        own = vars(self)
        threading.Thread(
            target=lambda: (own.pop("_gpu_group", None), own.pop("_group", None)), name=CLOSING
        ).start()

    def all_agree(self, ok: bool) -> bool:
        """Whether every rank, the sender included, says ok."""
        votes = torch.tensor([0 if ok else 1])
        with explained("a rank left before the vote"):
            options = dist.AllreduceOptions()
            options.timeout = TRANSFER_TIMEOUT
            self._group.allreduce([votes], options).wait()
        return int(votes) == 0

    def _buckets(
        self,
        tensors: NamedTensors,
        limit: int,
        hashes: Mapping[str, int],
        held: Manifest | None = None,
    ) -> Iterator[tuple[list[Sent], Tensor]]:
        """One bucket after the other: its tensors' names, types, shapes and hashes, and its bytes.

        The two buffers take turns: one may travel while the other is being filled.
        """
        sent: list[Sent] = []
        turn = filled = 0
        for name, tensor in tensors:
            own = byte_view(tensor.detach().cpu().contiguous())
            fact = name, str(tensor.dtype), list(tensor.shape)
            value = hashes.get(name)
            if held is not None:
                value = self.hashing.of(own) if value is None else value
                self.manifest[name] = [*fact[1:], value]
                if held.get(name) == self.manifest[name]:
                    continue
            if sent and filled + len(own) > limit:
                yield sent, self._room(turn, filled)
                sent, turn, filled = [], 1 - turn, 0
            if len(own) > limit:
                yield [(*fact, self.hashing.of(own) if value is None else value)], own
                continue

            place = self._room(turn, limit).numpy()[filled : filled + len(own)]
            if value is None:
                value = self.hashing.of_copied(place, own.numpy())
            else:
                place[:] = own.numpy()
            sent.append((*fact, value))
            filled += len(own)
        if sent:
            yield sent, self._room(turn, filled)

    def _room(self, which: int, num_bytes: int) -> Tensor:
        """A buffer of this size, which serves many buckets: fresh pages are slow."""
        if len(self._buffers[which]) < num_bytes:
            self._buffers[which] = _buffer_of(num_bytes)
        return self._buffers[which][:num_bytes]

    def _start_header(self, size: int, header: dict[str, Any]) -> list[Finish]:
        """Begin to send the size of the next bucket, and what it holds, signed."""
        text = json.dumps(header).encode()
        first = _LENGTHS.pack(size, len(text)) + self._sign(b"%d" % size, text)
        return [partial(_wait, self._start_broadcast(_tensor_of(part))) for part in (first, text)]

    def _receive_header(self) -> tuple[int, dict[str, Any] | None]:
        """The next bucket's size and header; none where it is not what the sender has signed."""
        first = _room_for(_LENGTHS.size + SIGNATURE_BYTES)
        self._broadcast(first)
        lengths, given = first.numpy().tobytes()[: _LENGTHS.size], first.numpy()[_LENGTHS.size :]
        size, length = _LENGTHS.unpack(lengths)
        sent = _room_for(length)
        self._broadcast(sent)
        text = sent.numpy().tobytes()
        is_whole = hmac.compare_digest(given.tobytes(), self._sign(b"%d" % size, text))
        header: dict[str, Any] | None = json.loads(text) if is_whole else None
        return size, header

    def _start_bucket(self, payload: Tensor) -> Finish:
        """Begin to broadcast these bytes; what is returned waits until they are there."""
        if self._gpu_group is None:
            return partial(_wait, self._start_broadcast(payload))
        on_gpu = torch.empty_like(payload, device=self.device)
        if self.rank == 0:
            on_gpu.copy_(payload)
        work = self._start_broadcast(on_gpu, self._gpu_group)

        def finish() -> None:
            _wait(work)
            if self.rank != 0:
                payload.copy_(on_gpu)

        return finish

    def _broadcast(self, tensor: Tensor) -> None:
        _wait(self._start_broadcast(tensor))

    def _start_broadcast(self, tensor: Tensor, group: Any = None) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, TRANSFER_TIMEOUT
        with explained("a broadcast could not begin"):
            work: dist.Work = (group or self._group).broadcast([tensor], options)
            return work


def _tensor_of(content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def _room_for(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8)


def _buffer_of(num_bytes: int) -> Tensor:
    """Memory that goes back to the system when it is freed: every sync has buffers of its own."""
    from workers.cpu.allocator import freed_at_once

    with freed_at_once():
        return _room_for(num_bytes)


def _finish(begun: Iterable[Finish]) -> None:
    for finish in begun:
        finish()


def _wait(work: dist.Work) -> None:
    with explained("a broadcast broke off; a worker died or fell behind"):
        work.wait()


def aligned(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """The piece itself, or a copy where it starts between two elements of `dtype`."""
    return piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()


def dtype_of(name: str) -> torch.dtype:
    """The type of this name, as a bucket's header has it."""
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype
