"""Write full (unsharded) weights into a module, and report tensors that do not fit."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from verl_like.errors import WeightSyncError
from workers.weights.checksum import as_integers


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
        """Write one full tensor; if the dtypes differ, check that the cast lost no bits."""
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
