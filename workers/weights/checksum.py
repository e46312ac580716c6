"""Hashes of full (unsharded) weights.

checksum_of(named_tensors)    every byte: two roles hold the same weights
CopyCheck                     what an engine holds is what was written into it
Fingerprint                   64 values of every tensor: which weights made a sample
noted                         tensors as they pass, for both of these
Hashing                       hashes of tensors on their way, with the time they cost
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from torch import Tensor

NamedTensors = Iterable[tuple[str, Tensor]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Seen = tuple[int, bytes | None]
"""What is known of a tensor that has arrived: its hash, and its values in a fingerprint, if any."""


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

    def of_copied(self, into: Bytes, own: Bytes) -> int:
        """Of bytes that are being copied, at less than half the price."""
        if len(own) <= self.CHUNK:
            began = time.perf_counter()
            value = xxhash.xxh3_64_intdigest(own)
            self.seconds += time.perf_counter() - began
            into[:] = own
            return value

        hasher = xxhash.xxh3_64()
        for start in range(0, len(own), self.CHUNK):
            chunk = own[start : start + self.CHUNK]
            into[start : start + self.CHUNK] = chunk
            began = time.perf_counter()
            hasher.update(chunk)
            self.seconds += time.perf_counter() - began
        return hasher.intdigest()

    def of_pieces(
        self, payload: Tensor, pieces: Sequence[tuple[int, torch.dtype]]
    ) -> Iterator[Seen]:
        """Of tensors that lie behind each other in CPU bytes, by their sizes and types, in turn.

        As many are looked at in one go as whoever takes them then finds in the L2 cache. Of small
        ones the calls cost more than the bytes: here they are few.
        """
        content = payload.numpy()
        whole, numbers = memoryview(content), content[: len(content) // 4 * 4].view(np.float32)
        start = at = 0
        while at < len(pieces):
            began, limit = time.perf_counter(), start + self.CHUNK
            found: list[Seen] = []
            while at < len(pieces) and (not found or start + pieces[at][0] <= limit):
                size, dtype = pieces[at]
                end, values = start + size, None
                if dtype is torch.float32 and start % 4 == 0:
                    values = numbers[start // 4 : end // 4 : _step(size // 4)].tobytes()
                found.append((xxhash.xxh3_64_intdigest(whole[start:end]), values))
                start, at = end, at + 1
            self.seconds += time.perf_counter() - began
            yield from found


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


_CPU = torch.device("cpu")


class _Found(NamedTuple):
    """The bytes of a float32 weight on the CPU.

    They keep its memory, so that nothing else can come to lie at that address.
    """

    weight: Tensor
    address: int
    size: int
    content: memoryview

    def is_of(self, weight: Tensor) -> bool:
        """Whether this weight still lies there."""
        return (
            weight is self.weight
            and weight.data_ptr() == self.address
            and weight.numel() == self.size
            and weight.is_contiguous()
        )


class CopyCheck:
    """Whether weights that were written into an engine are held as they came, bit for bit.

    `note` sees them go in; `damaged` reads what the engine then holds. Weights that come and stay
    on a GPU are hashed there. Where an engine's weights lie is remembered for its next load: with
    small ones, most of the time goes to finding their bytes.
    """

    def __init__(self) -> None:
        """`seconds` are those that the hashes of this load have cost so far."""
        self.seconds = 0.0
        self._came: dict[str, tuple[torch.dtype, torch.device, int]] = {}
        self._found: dict[str, _Found] = {}

    def begin(self) -> None:
        """The next load: nothing has come."""
        self.seconds, self._came = 0.0, {}

    def note(self, name: str, tensor: Tensor, known: int | None = None) -> None:
        """This is what the engine is to hold; its hash is taken, unless it is `known`."""
        value = self._hash(tensor) if known is None else known
        self._came[name] = tensor.dtype, tensor.device, value

    def damaged(self, held: NamedTensors) -> list[str]:
        """Names of the weights that are not as they came; another dtype must have kept all bits.

        Of one that did not come nothing is said.
        """
        names = []
        for name, weight in held:
            if name not in self._came:
                continue
            dtype, device, value = self._came[name]
            if dtype is torch.float32 and device == _CPU and self._is_found(name, weight):
                began = time.perf_counter()
                is_same = xxhash.xxh3_64_intdigest(self._found[name].content) == value
                self.seconds += time.perf_counter() - began
            else:
                if weight.dtype is not dtype or weight.device != device:
                    weight = weight.detach().to(device, dtype)
                is_same = self._hash(weight) == value
            if not is_same:
                names.append(name)
        return names

    def _is_found(self, name: str, weight: Tensor) -> bool:
        """Whether its bytes are known: those that lie at its address now, of its size."""
        found = self._found.get(name)
        if found is not None and found.is_of(weight):
            return True
        numbers = array_of(weight)
        if numbers is None or not numbers.flags.c_contiguous:
            self._found.pop(name, None)
            return False
        content = memoryview(numbers.reshape(-1).view(np.uint8))
        self._found[name] = _Found(weight, weight.data_ptr(), numbers.size, content)
        return True

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


def _step(count: int) -> int:
    """From one number of a fingerprint to the next: of so many it has 64, or a few more."""
    return max(1, count // 64)


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

    def note(self, name: str, tensor: Tensor, known: bytes | None = None) -> None:
        """Take a full tensor in; its values are read, unless they are `known`."""
        values = _values_of(tensor) if known is None else known
        self._parts[name] = _described(name, tensor.shape) + values

    def value(self) -> int:
        """63 bits."""
        whole = b"\n".join(self._parts[name] for name in sorted(self._parts))
        return int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little") >> 1


def _values_of(tensor: Tensor) -> bytes:
    numbers, step = array_of(tensor), _step(tensor.numel())
    if numbers is not None:
        return numbers.reshape(-1)[::step].tobytes()
    return tensor.detach().reshape(-1)[::step].float().cpu().numpy().tobytes()


def noted(
    tensors: NamedTensors,
    came: CopyCheck,
    fingerprint: Fingerprint,
    seen: Mapping[str, Seen] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, noted as they pass; of those that were `seen` by then, nothing is read."""
    seen = {} if seen is None else seen
    for name, tensor in tensors:
        known, values = seen.get(name, (None, None))
        came.note(name, tensor, known)
        fingerprint.note(name, tensor, values)
        yield name, tensor
