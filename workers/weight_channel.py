"""The wire between processes that do not share weights: a private gloo group of one sender and all receivers.

`weight_sync` opens a channel per sync and drops it after: a restarted engine simply joins the next one. Tensors travel
whole in buckets of about `bucket_mb`; a bucket's header carries its number and, per tensor, name, dtype, shape and
a 64-bit hash. The default process group is not touched.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.errors import WeightSyncError
from workers.weights import NamedTensors, byte_view, hash_of

FORM_TIMEOUT = timedelta(seconds=20)
"""How long a rank waits for the others to join."""
TRANSFER_TIMEOUT = timedelta(seconds=120)
"""How long one broadcast may take, the gathering of its tensors included."""


def open_store() -> tuple[dist.TCPStore, str]:
    """A store on a free port of this machine, and its address `host:port`."""
    if os.environ.get("GLOO_SOCKET_IFNAME") == "lo":
        host = "127.0.0.1"
    else:
        host = os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=FORM_TIMEOUT)
    return store, f"{host}:{store.port}"


def join_store(address: str) -> dist.TCPStore:
    """The sender's store, from another process."""
    host, _, port = address.rpartition(":")
    with _explained(f"cannot reach the sender's store at {address}"):
        return dist.TCPStore(host, int(port), is_master=False, timeout=FORM_TIMEOUT)


class Channel:
    """This process's end; rank 0 sends, ranks 1..num_receivers receive."""

    def __init__(self, store: dist.Store, rank: int, num_receivers: int) -> None:
        self.rank = rank
        self.corrupt: list[str] = []
        self.num_bytes = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        _meet(store, rank, num_receivers)
        with _explained("the group of sender and receivers did not form"):
            store = dist.PrefixStore("weights", store)
            self._group = dist.ProcessGroupGloo(store, rank, num_receivers + 1, FORM_TIMEOUT)

    def send(self, tensors: NamedTensors, bucket_mb: float) -> None:
        """Broadcast all tensors; a tensor larger than a bucket travels alone."""
        number = -1
        for number, bucket in enumerate(_buckets(tensors, int(bucket_mb * 2**20))):
            header = [(name, str(t.dtype), list(t.shape), hash_of(byte_view(t))) for name, t in bucket]
            self._send_header({"number": number, "tensors": header})
            pieces = [byte_view(tensor) for _, tensor in bucket]
            payload = torch.cat(pieces, out=self._room(sum(map(len, pieces)))) if len(pieces) > 1 else pieces[0]
            self._broadcast(payload)
            self.num_bytes += payload.numel()
        self._send_header({"number": number + 1, "tensors": []})

    def receive(self) -> Iterator[tuple[str, Tensor]]:
        """What the sender broadcasts, tensor by tensor, each valid until the next; damage is noted in `corrupt`."""
        expected = 0
        while True:
            header = self._receive_header()
            if header["number"] != expected:
                self.corrupt.append(f"bucket {header['number']} in the place of bucket {expected}")
            expected += 1
            if not header["tensors"]:
                return
            tensors = [(name, _dtype(dtype), shape, number) for name, dtype, shape, number in header["tensors"]]
            sizes = [torch.Size(shape).numel() * dtype.itemsize for _, dtype, shape, _ in tensors]
            payload = self._room(sum(sizes))
            self._broadcast(payload)
            self.num_bytes += payload.numel()
            for (name, dtype, shape, number), piece in zip(tensors, torch.split(payload, sizes), strict=True):
                if hash_of(piece) != number:
                    self.corrupt.append(name)
                yield name, _aligned(piece, dtype).view(dtype).reshape(shape)

    def all_agree(self, ok: bool) -> bool:
        """Whether every rank, the sender included, says ok."""
        votes = torch.tensor([0 if ok else 1])
        with _explained("a rank left before the vote"):
            options = dist.AllreduceOptions()
            options.timeout = TRANSFER_TIMEOUT
            self._group.allreduce([votes], options).wait()
        return int(votes) == 0

    def _room(self, num_bytes: int) -> Tensor:
        """A buffer of this size; one memory serves every bucket, since fresh pages cost more than the transfer."""
        if len(self._buffer) < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]

    def _send_header(self, header: dict[str, Any]) -> None:
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self._broadcast(torch.tensor([text.numel()]))
        self._broadcast(text)

    def _receive_header(self) -> dict[str, Any]:
        length = torch.zeros(1, dtype=torch.long)
        self._broadcast(length)
        text = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(text)
        header: dict[str, Any] = json.loads(text.numpy().tobytes())
        return header

    def _broadcast(self, tensor: Tensor) -> None:
        with _explained("a broadcast broke off; a worker died or fell behind"):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = 0, 0, TRANSFER_TIMEOUT
            self._group.broadcast([tensor], options).wait()


def _meet(store: dist.Store, rank: int, num_receivers: int) -> None:
    """Wait until every rank is there; the sender names those that are not."""
    store.set(f"joined/{rank}", "yes")
    if rank != 0:
        with _explained("the sender waited in vain for another rollout rank, or is gone itself"):
            store.wait(["complete"], FORM_TIMEOUT)
        return
    keys = {f"joined/{other}": other for other in range(1, num_receivers + 1)}
    try:
        store.wait(list(keys), FORM_TIMEOUT)
    except dist.DistStoreError as error:
        absent = ", ".join(_who(other) for key, other in keys.items() if not store.check([key]))
        raise WeightSyncError(
            f"weight sync: waited {FORM_TIMEOUT.total_seconds():.0f} s for {absent}: not there. "
            "Is that worker alive, and not busy with another call?"
        ) from error
    store.set("complete", "yes")


def _buckets(tensors: NamedTensors, num_bytes: int) -> Iterator[list[tuple[str, Tensor]]]:
    """Consecutive tensors on the CPU, together at most `num_bytes` unless one alone is larger."""
    bucket: list[tuple[str, Tensor]] = []
    filled = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if bucket and filled + size > num_bytes:
            yield bucket
            bucket, filled = [], 0
        bucket.append((name, tensor.detach().cpu().contiguous()))
        filled += size
    if bucket:
        yield bucket


def _aligned(piece: Tensor, dtype: torch.dtype) -> Tensor:
    """The piece itself, or a copy where it starts between two elements of `dtype`."""
    return piece if piece.storage_offset() % dtype.itemsize == 0 else piece.clone()


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _who(rank: int) -> str:
    return f"rollout rank {rank - 1}" if rank else "the sender (actor rank 0)"


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Errors of torch's transport as `WeightSyncError`s that say what we were doing."""
    try:
        yield
    except WeightSyncError:
        raise
    except (RuntimeError, dist.DistError) as error:
        raise WeightSyncError(f"weight sync: {what}: {str(error).splitlines()[0]}") from error
