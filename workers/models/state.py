"""What a model's weights are: all of its state, parameters and persistent buffers alike.

A router's correction bias (deepseek_v3, glm4_moe, lfm2_moe) or gemma4's `layer_scalar` is a buffer:
no optimizer changes it, and the model computes something else without it. Whatever loads, sends,
saves or compares weights goes through `named_state`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers.parallel.placements import own_ranges


def named_state(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight by name: the parameters, tied ones once, then the persistent buffers."""
    yield from module.named_parameters()
    yield from persistent_buffers(module)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The buffers that a folder of weights holds; others, such as rotary tables, are computed."""
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and id(buffer) not in seen:
                seen.add(id(buffer))
                yield (f"{prefix}.{name}" if prefix else name), buffer


def set_buffer_dtype(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep persistent buffers in this type, as the trainer does, whatever the parameters are in.

    A router's bias decides between experts whose scores are close: rounded, it would choose others.
    """
    for child in module.modules():
        for name, buffer in child.named_buffers(recurse=False):
            if name not in child._non_persistent_buffers_set and buffer.is_floating_point():
                child._buffers[name] = buffer.to(dtype)


def own_part(tensor: Tensor) -> Tensor:
    """What this rank holds of a weight, to be read or written."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def own_rows(weight: Tensor, whole: Any) -> Tensor:
    """The part of a whole tensor, or of a file's, that this rank holds of the weight."""
    if not isinstance(weight, DTensor):
        part: Tensor = whole[...]
        return part
    return _read(whole, own_ranges(weight), ())


def _read(whole: Any, ranges: list[list[range]], chosen: tuple[slice, ...]) -> Tensor:
    """Of `ranges` along every dim those after the ones that were `chosen`, end to end."""
    dim = len(chosen)
    if dim == len(ranges):
        found: Tensor = whole[chosen]
        return found
    along = [slice(one.start, one.stop) for one in ranges[dim]] or [slice(0, 0)]
    parts = [_read(whole, ranges, (*chosen, one)) for one in along]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)
