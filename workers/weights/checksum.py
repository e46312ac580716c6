"""Hashes of full (unsharded) weights.

checksum_of(named_tensors)    every byte: two roles hold the same weights
CopyCheck                     what an engine holds is what was written into it
Fingerprint                   64 values of every tensor: which weights made a sample
Hashing                       hashes of single tensors on their way, with the time they cost
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

NamedTensors = Iterable[tuple[str, Tensor]]


def byte_view(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def hash_of(payload: Tensor) -> int:
    """The 64-bit XXH3 of a CPU byte tensor."""
    return xxhash.xxh3_64_intdigest(payload.numpy())


def array_of(tensor: Tensor) -> np.ndarray[Any, Any] | None:
    """The float32 numbers of a CPU tensor, without a copy; None for another type, or elsewhere.

    Of small tensors the calls cost more than the bytes: this is one call, `byte_view` four.
    """
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter)
    if not is_plain or tensor.dtype is not torch.float32 or not tensor.is_cpu:
        return None
    return (tensor.detach() if tensor.requires_grad else tensor).numpy()


class Hashing:
    """Takes hashes (`hash_of`) and the time that they cost."""

    CHUNK = 2**18
    """Bytes that are copied and hashed in turn, so that the hash finds them in the L2 cache."""

    def __init__(self) -> None:
        """`seconds` are those that hashes have cost so far."""
        self.seconds = 0.0

    def of(self, payload: Tensor) -> int:
        """Of CPU bytes."""
        began = time.perf_counter()
        value = hash_of(payload)
        self.seconds += time.perf_counter() - began
        return value

    def of_copied(self, target: Tensor, source: Tensor) -> int:
        """Of CPU bytes that are being copied, at less than half the price."""
        into, own = target.numpy(), source.numpy()
        if len(own) <= self.CHUNK:
            into[:] = own
            began = time.perf_counter()
            value = xxhash.xxh3_64_intdigest(into)
            self.seconds += time.perf_counter() - began
            return value

        hasher = xxhash.xxh3_64()
        for start in range(0, len(own), self.CHUNK):
            chunk = own[start : start + self.CHUNK]
            into[start : start + self.CHUNK] = chunk
            began = time.perf_counter()
            hasher.update(chunk)
            self.seconds += time.perf_counter() - began
        return hasher.intdigest()


def checksum_of(tensors: NamedTensors) -> str:
    """A hash of names, shapes and float32 bytes of full tensors, whatever their order and dtype."""
    hashes = (
        (name, t.shape, hash_of(byte_view(t.detach().float().cpu().contiguous())))
        for name, t in tensors
    )
    return digest_of(hashes)


def digest_of(hashes: Iterable[tuple[str, Iterable[int], int]]) -> str:
    """One hash of (name, shape, hash) of every tensor, in any order."""
    parts = sorted(f"{name} {list(shape)} {number:016x}" for name, shape, number in hashes)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class CopyCheck:
    """Whether weights that were written into an engine are held as they came, bit for bit.

    `watch` sees them go in; `damaged` reads what the engine then holds. Weights that come and stay
    on a GPU are hashed there.
    """

    def __init__(self) -> None:
        """`seconds` are those that hashes have cost so far."""
        self.seconds = 0.0
        self._came: dict[str, tuple[torch.dtype, torch.device, int]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether a weight of this name came."""
        return name in self._came

    def watch(
        self, tensors: NamedTensors, hashes: Mapping[str, int] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, hashed as they pass, unless their `hashes` are known by then."""
        for name, tensor in tensors:
            self.note(name, tensor, None if hashes is None else hashes.get(name))
            yield name, tensor

    def note(self, name: str, tensor: Tensor, known: int | None = None) -> None:
        """This is what the engine is to hold; its hash is taken, unless it is `known`."""
        value = self._hash(tensor) if known is None else known
        self._came[name] = tensor.dtype, tensor.device, value

    def damaged(self, held: NamedTensors) -> list[str]:
        """Names of the weights that are not as they came; another dtype must have kept all bits."""
        names = []
        for name, weight in held:
            dtype, device, value = self._came[name]
            if weight.dtype is not dtype or weight.device != device:
                weight = weight.detach().to(device, dtype)
            if self._hash(weight) != value:
                names.append(name)
        return names

    def _hash(self, tensor: Tensor) -> int:
        began = time.perf_counter()
        numbers = array_of(tensor)
        if numbers is not None:
            value = xxhash.xxh3_64_intdigest(np.ascontiguousarray(numbers))
        else:
            payload = byte_view(tensor.contiguous())
            is_here = payload.device.type == "cpu"
            value = hash_of(payload) if is_here else hash_on_device(payload)
        self.seconds += time.perf_counter() - began
        return value


def hash_on_device(payload: Tensor, chunk: int = 2**22) -> int:
    """64 bits of a byte tensor, made where it is: its bytes times odd numbers, summed.

    A changed byte changes it, and so does a swap of two that differ, but for one in 2**56.
    """
    total = torch.zeros((), dtype=torch.int64, device=payload.device)
    for start in range(0, len(payload), chunk):
        part = payload[start : start + chunk].to(torch.int64)
        places = torch.arange(start, start + len(part), device=payload.device)
        total += (part * (places * 0x9E3779B97F4A7C1 * 2 + 1)).sum()
    return int(total)


@lru_cache(maxsize=2**14)
def _described(name: str, shape: torch.Size) -> bytes:
    return f"{name} {list(shape)} ".encode()


class Fingerprint:
    """Names a set of weights by 64 values of every tensor.

    It is cheap enough to be taken at every sync, of weights that are shared too. Equal weights have
    equal fingerprints, whatever their order and dtype; an update of the optimizer changes it.
    """

    def __init__(self) -> None:
        self._parts: dict[str, bytes] = {}

    def note(self, name: str, tensor: Tensor) -> None:
        """Take a full tensor in."""
        step = max(1, tensor.numel() // 64)
        numbers = array_of(tensor)
        if numbers is not None:
            values = numbers.reshape(-1)[::step].tobytes()
        else:
            values = tensor.detach().reshape(-1)[::step].float().cpu().numpy().tobytes()
        self._parts[name] = _described(name, tensor.shape) + values

    def watch(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        """The same tensors, noted as they pass."""
        for name, tensor in tensors:
            self.note(name, tensor)
            yield name, tensor

    def value(self) -> int:
        """63 bits."""
        whole = b"\n".join(self._parts[name] for name in sorted(self._parts))
        return int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little") >> 1
