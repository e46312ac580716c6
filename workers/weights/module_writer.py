"""Write full (unsharded) weights into a module, and report tensors that do not fit."""

from __future__ import annotations

from torch import Tensor, nn

from verl_like.errors import WeightSyncError
from workers.weights.checksum import words_of


class ModuleWriter:
    """Writes synced weights into a module, such as the module of your own rollout engine.

        writer = ModuleWriter(module)
        for name, tensor in named_tensors: writer.write_tensor(name, tensor)
        writer.verify("my engine")          # raises if weights are missing, unknown or unfit

    A tensor may arrive in another dtype than the weight's if no bit is lost (float32 from
    bfloat16). Tied weights arrive under one of their names. Persistent buffers are weights, too.
    """

    def __init__(self, module: nn.Module) -> None:
        self.targets: dict[str, Tensor] = module.state_dict(keep_vars=True)
        self.received: set[int] = set()
        self.extra: list[str] = []
        self.unfit: list[str] = []
        self.changed: list[str] = []

    def write_tensor(self, name: str, tensor: Tensor) -> None:
        """Copy one full tensor; if the dtype differs, compare the result."""
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
        """Raise one error that lists all problems."""
        first_names = {id(weight): name for name, weight in reversed(self.targets.items())}
        missing = [name for key, name in first_names.items() if key not in self.received][::-1]
        other = {"of another shape": self.unfit, "that lost bits": self.changed}
        raise_problems(who, missing=missing, unknown=self.extra, **other)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """True if two tensors of one dtype are equal bit for bit, NaN and signed zeros included."""
    return words_of(left).equal(words_of(right))


def describe_problems(who: str, **problems: list[str]) -> str:
    """Describe the problems by kind, with the names of tensors; "" if there are none."""
    parts = []
    for kind, names in problems.items():
        if names:
            parts.append(f"{len(names)} {kind}: {', '.join(names[:20])}")
    return f"{who}: {'; '.join(parts)}." if parts else ""


def raise_problems(who: str, **problems: list[str]) -> None:
    """Raise a `WeightSyncError` that describes these problems, if there are any."""
    text = describe_problems(who, **problems)
    if text:
        raise WeightSyncError(text)
