"""A model's state consists of its parameters and its persistent buffers.

A router's correction bias (deepseek_v3, glm4_moe, lfm2_moe) or gemma4's `layer_scalar` is a buffer:
no optimizer changes it, but the model needs it. Code that loads, sends, exports or compares weights
uses `named_state`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers.parallel.placements import local_ranges

Named = Iterable[tuple[str, Tensor]]
"""Tensors with their names."""


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight by name: the parameters, tied ones once, then the persistent buffers."""
    yield from module.named_parameters()
    yield from persistent_buffers(module)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that model files store; others, such as rotary tables, are computed."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer


def set_buffer_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point persistent buffers to `dtype`; parameters keep their dtype.

    A router's bias decides between experts with similar scores. If it were rounded, the router
    might choose other experts.
    """
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a weight, detached; writes to it change the weight."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def local_rows(weight: Tensor, source: Any) -> Tensor:
    """Return this rank's shard of `source`, a full tensor or the slice of a file's tensor."""
    if not isinstance(weight, DTensor):
        part: Tensor = source[...]
        return part
    return _read(source, local_ranges(weight), ())


def _read(source: Any, ranges: list[list[range]], chosen: tuple[slice, ...]) -> Tensor:
    """Read and concatenate the `ranges` of the dimensions that `chosen` does not cover."""
    dim = len(chosen)
    if dim == len(ranges):
        selected: Tensor = source[chosen]
        return selected
    along = [slice(span.start, span.stop) for span in ranges[dim]] or [slice(0, 0)]
    parts = [_read(source, ranges, (*chosen, span)) for span in along]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def is_adapter(name: str) -> bool:
    """True if a parameter of this name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name
