"""Full (unsharded) weights of a model: their hashes, and writing them into a module.

checksum_of(named_tensors)    one hash of all weights, to compare the weights of two roles
hashes_of, copy_hashed        a hash per tensor, to verify a transfer
ExpectedTensors               reports tensors that do not fit

Hashes are computed on the device of the tensors.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
import xxhash
from torch import Tensor, nn

from verl_like.errors import WeightSyncError
from workers.models.tensor_files import byte_view

HOST = torch.device("cpu")
NamedTensors = Iterable[tuple[str, Tensor]]
NumberedTensor = tuple[torch.Size, Tensor]
"""The shape of a tensor, and its hash as a tensor with one element."""
CHUNK = 2**18
"""Bytes that are copied and then hashed at a time, so that hashing reads them from the L2 cache."""
DEVICE_CHUNK = 2**20
"""Number of 32-bit words in a chunk; within a chunk, every word has a different factor."""
DEVICE_CHUNKS = 8
"""Chunks that are hashed at a time on a device, which takes 128 MiB of memory."""


def as_integers(tensor: Tensor) -> Tensor:
    """View the bits of each element of a contiguous tensor as an integer, without a copy."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(integers[tensor.dtype.itemsize])


def hash_of(payload: Tensor) -> int:
    """Return a 64-bit hash of a byte tensor: XXH3 in host memory, `hash_on_device` elsewhere.

    Hashes can only be compared if they come from the same kind of memory.
    """
    return hashes_of([payload])[0]


def hashes_of(payloads: Sequence[Tensor]) -> list[int]:
    """Return `hash_of` for each tensor; the hashes on a device are copied to the host together."""
    if not payloads or payloads[0].is_cpu:
        return [xxhash.xxh3_64_intdigest(payload.numpy().data) for payload in payloads]
    return hashes_on_host([hash_on_device(payload) for payload in payloads])


def hashes_on_host(hashes: Sequence[Tensor]) -> list[int]:
    """Copy hashes to the host together, which waits for the device once."""
    values: list[int] = to_host(torch.stack(list(hashes))).tolist() if hashes else []
    return values


def to_host(numbers: Tensor) -> Tensor:
    """Copy hashes to the host; the weights themselves stay on the device."""
    return numbers.cpu()


def hash_on_device(payload: Tensor) -> Tensor:
    """Return a 64-bit hash of a byte tensor, on its device and with the same value on every device.

    It is the sum of the 32-bit words, each multiplied by an odd number, so a change of one word
    always changes it. Any other change, such as swapped words, is missed with a probability of at
    most 2**-32.
    """
    size = payload.numel()
    if size % 4 or payload.storage_offset() % 4:
        payload = torch.cat([payload, payload.new_zeros(-size % 4)])
    total = torch.full((), size, dtype=torch.int64, device=payload.device)
    multipliers, powers = _factors(payload.device)
    for words in payload.view(torch.int32).split(DEVICE_CHUNKS * DEVICE_CHUNK):
        width = max(1, min(len(words), DEVICE_CHUNK))
        chunks = torch.nn.functional.pad(words, (0, -len(words) % width)).view(-1, width)
        sums = (chunks.long() * multipliers[:width]).sum(dim=1)
        end = len(powers) - len(sums)
        total = total * powers[end - 1] + (sums * powers[end:]).sum()
    return total


_FACTORS = 0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9


@lru_cache(maxsize=16)
def _factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors of the words in a chunk, and the factors of the chunks.

    The factors of words are odd and pseudorandom, mixed as in splitmix64. The factors of chunks are
    decreasing powers of one number, and end with 1.
    """
    mixed = torch.arange(1, DEVICE_CHUNK + 1, device=device) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> 30)) * _FACTORS[1]
    powers = torch.full((DEVICE_CHUNKS + 1,), _FACTORS[0], device=device)
    powers[0] = 1
    return (mixed ^ (mixed >> 27)) | 1, powers.cumprod(dim=0).flip(0)


def copy_hashed(into: Tensor, source: Tensor) -> int:
    """Copy bytes in host memory and return their hash, in less than half the time of two passes."""
    hasher = xxhash.xxh3_64()
    target, content = into.numpy(), source.numpy()
    for start in range(0, len(content), CHUNK):
        chunk = content[start : start + CHUNK]
        target[start : start + CHUNK] = chunk
        hasher.update(chunk.data)
    return hasher.intdigest()


class Stopwatch:
    """Sums the seconds spent in `running`."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Context whose duration is added to `seconds`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


def checksum_of(tensors: NamedTensors) -> str:
    """Return a hash of full tensors: of their names, their shapes, and their values in float32.

    It does not depend on the order of the tensors, their dtypes or their devices.
    """
    return checksum_of_hashes({name: (t.shape, float32_hash(t)) for name, t in tensors})


def float32_hash(tensor: Tensor) -> Tensor:
    """Return `hash_on_device` of the tensor's values in float32."""
    return hash_on_device(byte_view(tensor.float()))


def checksum_of_hashes(hashes: Mapping[str, NumberedTensor]) -> str:
    """Return the checksum of tensors from their shapes and `float32_hash`es."""
    numbers = [number for _, number in hashes.values()]
    parts = zip(hashes, hashes.values(), hashes_on_host(numbers), strict=True)
    return digest_of((name, shape, number) for name, (shape, _), number in parts)


def digest_of(hashes: Iterable[tuple[str, Iterable[int], int]]) -> str:
    """Return one hash of (name, shape, hash) of every tensor, in any order."""
    parts = sorted(f"{name} {list(shape)} {number % 2**64:016x}" for name, shape, number in hashes)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class ExpectedTensors:
    """Compares arriving tensors with the names and shapes that are expected."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = shapes
        self.arrived: set[str] = set()
        self.unknown: list[str] = []
        self.unfit: list[str] = []

    def fits(self, name: str, tensor: Tensor) -> bool:
        """Record that a tensor has arrived; return True if its name and shape are expected."""
        self.arrived.add(name)
        shape = self.shapes.get(name)
        if shape is None:
            self.unknown.append(name)
        elif shape != tensor.shape:
            self.unfit.append(f"{name} (is {list(shape)}, was sent {list(tensor.shape)})")
        return shape == tensor.shape

    def verify(self, receiver: str, **other_problems: list[str]) -> None:
        """Raise one error that lists all problems, if any. Call this after the last tensor."""
        missing = [name for name in self.shapes if name not in self.arrived]
        other = {"of another shape": self.unfit, **other_problems}
        raise_problems(receiver, missing=missing, unknown=self.unknown, **other)


class ModuleWriter:
    """Writes synced weights into a module, such as the module of your own rollout engine.

        writer = ModuleWriter(module)
        for name, tensor in named_tensors: writer.write_tensor(name, tensor)
        writer.verify("my engine")          # raises if weights are missing, unknown or unfit

    A tensor may have another dtype than the weight if the cast loses no bits (such as bfloat16
    values sent as float32). Tied weights arrive under one of their names. Persistent buffers count
    as weights.
    """

    def __init__(self, module: nn.Module) -> None:
        """Take the module whose weights are overwritten in place."""
        self.targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
        first_names = {id(weight): name for name, weight in reversed(self.targets.items())}
        self.first_names = {name: first_names[id(weight)] for name, weight in self.targets.items()}
        shapes = {self.first_names[name]: weight.shape for name, weight in self.targets.items()}
        self.expected = ExpectedTensors(shapes)
        self.changed: list[str] = []

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Write a full tensor with this `name`; if dtypes differ, check that no bits are lost."""
        if not self.expected.fits(self.first_names.get(name, name), tensor):
            return

        weight = self.targets[name].detach()
        weight.copy_(tensor)
        if weight.dtype == tensor.dtype:
            return

        sent = tensor.to(weight.device).contiguous()
        if not as_integers(weight.to(sent.dtype)).equal(as_integers(sent)):  # also NaN and -0.0
            self.changed.append(f"{name} (is {weight.dtype}, was sent {sent.dtype})")

    def verify(self, receiver: str) -> None:
        """Raise a `WeightSyncError` that names the receiver and all problems, if there are any."""
        self.expected.verify(receiver, **{"that lost bits": self.changed})


def describe_problems(receiver: str, **problems: list[str]) -> str:
    """Describe the problems by kind, with up to 20 tensor names each; "" if there are none."""
    kinds = ((kind, names) for kind, names in problems.items() if names)
    parts = [f"{len(names)} {kind}: {', '.join(names[:20])}" for kind, names in kinds]
    return f"{receiver}: {'; '.join(parts)}." if parts else ""


def raise_problems(receiver: str, **problems: list[str]) -> None:
    """Raise a `WeightSyncError` that describes these problems, if there are any."""
    text = describe_problems(receiver, **problems)
    if text:
        raise WeightSyncError(text)
