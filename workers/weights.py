"""Full (unsharded) weights: their checksum, and writing them into a module with an account of what does not fit.

Engines write through a `WeightSink`; every role's `weights_checksum` is `checksum_of` its named full tensors.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable

import torch
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


def crc_of(payload: Tensor) -> int:
    """crc32 of a CPU byte tensor."""
    return zlib.crc32(payload.numpy().data)


def checksum_of(tensors: NamedTensors) -> str:
    """A hash of names, shapes and float32 bytes of full (unsharded) tensors, whatever their order and dtype."""
    crcs = ((name, t.shape, crc_of(byte_view(t.detach().float().cpu().contiguous()))) for name, t in tensors)
    lines = sorted(f"{name} {list(shape)} {crc:08x}" for name, shape, crc in crcs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class WeightSink:
    """Writes tensors into a module's weights and keeps account of what is missing, unknown or does not fit.

    A tensor may arrive in another dtype than the weight's if no bit is lost (float32 that came from bfloat16); tied
    weights arrive under one of their names.
    """

    def __init__(self, module: nn.Module) -> None:
        self.weights = dict(module.named_parameters())
        self.targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self.received: set[int] = set()
        self.extra: list[str] = []
        self.unfit: list[str] = []
        self.changed: list[str] = []

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Copy one full tensor and compare what was written."""
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
        sent = tensor.to(weight.device).contiguous()
        if not same_bits(weight.to(sent.dtype), sent):
            self.changed.append(f"{name} (is {weight.dtype}, was sent {sent.dtype})")

    def verify(self, who: str) -> None:
        """Raise one error that lists everything wrong."""
        missing = [name for name, weight in self.weights.items() if id(weight) not in self.received]
        other = {"of another shape": self.unfit, "that lost bits": self.changed}
        refuse(who, missing=missing, unknown=self.extra, **other)


def refuse(who: str, **problems: list[str]) -> None:
    """Raise a `WeightSyncError` naming the tensors of every kind of problem that has any."""
    found = [f"{len(names)} {kind}: {', '.join(names[:20])}" for kind, names in problems.items() if names]
    if found:
        raise WeightSyncError(f"{who}: {'; '.join(found)}.")
