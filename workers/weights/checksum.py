"""Full (unsharded) weights: their checksum, and writing them into a module with an account of what
does not fit.

Engines write through a `WeightSink`; every role's `weights_checksum` is `checksum_of` its named
full tensors. Samples are stamped with the `Fingerprint` of the weights that made them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator

import torch
import xxhash
from torch import Tensor, nn

from verl_like.errors import WeightSyncError

NamedTensors = Iterable[tuple[str, Tensor]]


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors of one dtype are equal bit for bit, NaN and signed zeros included."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.dtype.itemsize]
    return left.view(words).equal(right.view(words))


def hash_of(payload: Tensor) -> int:
    """The 64-bit XXH3 of a CPU byte tensor."""
    return xxhash.xxh3_64_intdigest(payload.numpy())


class Hashing:
    """Takes hashes (`hash_of`) and the time that they cost."""

    CHUNK = 2**18
    """Bytes that are copied and hashed in turn: they come from the second-level cache for the
    second of the two.
    """

    def __init__(self) -> None:
        """`seconds` are those spent so far."""
        self.seconds = 0.0

    def of(self, payload: Tensor) -> int:
        """Of CPU bytes."""
        began = time.perf_counter()
        value = hash_of(payload)
        self.seconds += time.perf_counter() - began
        return value

    def of_copied(self, target: Tensor, source: Tensor) -> int:
        """Of CPU bytes that are being copied, at less than half the price."""
        into, own, hasher = target.numpy(), source.numpy(), xxhash.xxh3_64()
        for start in range(0, len(own), self.CHUNK):
            chunk = own[start : start + self.CHUNK]
            into[start : start + self.CHUNK] = chunk
            began = time.perf_counter()
            hasher.update(chunk)
            self.seconds += time.perf_counter() - began
        return hasher.intdigest()


def checksum_of(tensors: NamedTensors) -> str:
    """A hash of names, shapes and float32 bytes of full (unsharded) tensors, whatever their order
    and dtype.
    """
    hashes = (
        (name, t.shape, hash_of(byte_view(t.detach().float().cpu().contiguous())))
        for name, t in tensors
    )
    return digest_of(hashes)


def digest_of(hashes: Iterable[tuple[str, Iterable[int], int]]) -> str:
    """One hash of (name, shape, hash) of every tensor, in any order."""
    lines = sorted(f"{name} {list(shape)} {number:016x}" for name, shape, number in hashes)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class Fingerprint:
    """Names a set of weights by 64 values of every tensor: cheap enough to be taken at every sync,
    shared weights too.

    Equal weights have equal fingerprints, whatever their order and dtype; an update of the
    optimizer changes it.
    """

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        """Take a full tensor in."""
        flat = tensor.detach().reshape(-1)
        values = flat[:: max(1, flat.numel() // 64)].float().cpu().numpy().tobytes()
        self._parts[name] = f"{name} {list(tensor.shape)} ".encode() + values

    def watch(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, noted as they pass."""
        for name, tensor in tensors:
            self.note(name, tensor)
            yield name, tensor

    def value(self) -> int:
        """63 bits."""
        whole = b"\n".join(self._parts[name] for name in sorted(self._parts))
        return int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little") >> 1


class WeightSink:
    """Writes tensors into a module's weights and keeps account of what is missing, unknown or does
    not fit.

    A tensor may arrive in another dtype than the weight's if no bit is lost (float32 that came from
    bfloat16); tied weights arrive under one of their names.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights = dict(module.named_parameters())
        self.targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self.received: set[int] = set()
        self.extra: list[str] = []
        self.unfit: list[str] = []
        self.changed: list[str] = []

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Copy one full tensor; into another dtype, compare what was written."""
        target = self.targets.get(name)
        if target is None:
            self.extra.append(name)
            return
        self.received.add(id(target))
        if target.shape != tensor.shape:
            self.unfit.append(f"{name} (is {list(target.shape)}, was sent {list(tensor.shape)})")
            return
        weight = target.detach()
        weight.copy_(tensor)
        if weight.dtype == tensor.dtype:
            return
        sent = tensor.to(weight.device).contiguous()
        if not same_bits(weight.to(sent.dtype), sent):
            self.changed.append(f"{name} (is {weight.dtype}, was sent {sent.dtype})")

    def verify(self, who: str) -> None:
        """Raise one error that lists everything wrong."""
        missing = [name for name, weight in self.weights.items() if id(weight) not in self.received]
        other = {"of another shape": self.unfit, "that lost bits": self.changed}
        refuse(who, missing=missing, unknown=self.extra, **other)


def account_of(who: str, **problems: list[str]) -> str:
    """What is wrong in words, naming the tensors of every kind of problem that has any; nothing if
    none has.
    """
    found = [
        f"{len(names)} {kind}: {', '.join(names[:20])}" for kind, names in problems.items() if names
    ]
    return f"{who}: {'; '.join(found)}." if found else ""


def refuse(who: str, **problems: list[str]) -> None:
    """Raise a `WeightSyncError` with the account of these problems, if there are any."""
    if account := account_of(who, **problems):
        raise WeightSyncError(account)
