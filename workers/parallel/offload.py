"""What rests in host memory between calls: weights and moments, each in one page-locked block."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers.parallel.page_lock import lock_pages
from workers.parallel.placements import local_part
from workers.parallel.sharding import Sharding

ALIGNMENT = 256
"""Bytes that a tensor's place in a block is a multiple of."""


class HostBlock:
    """One page-locked block, in which tensors are laid end to end."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """They grow when more are needed, and stay for the next time."""
        self._unlock: Callable[[], object] | None = None

    def copies_of(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Copies by the tensors' ids, on their way; those that were made before are gone."""
        sizes = [-(-local_part(one).nbytes // ALIGNMENT) * ALIGNMENT for one in tensors]
        if sum(sizes) > len(self.bytes):
            if self._unlock is not None:
                self._unlock()
            self.bytes = torch.empty(sum(sizes), dtype=torch.uint8)
            self._unlock = lock_pages(self, self.bytes)

        places = self.bytes[: sum(sizes)].split(sizes)
        return {id(one): _copy(one, to) for one, to in zip(tensors, places, strict=True)}


@torch.no_grad()
def _copy(tensor: Tensor, place: Tensor) -> Tensor:
    own = local_part(tensor)
    copy = place[: own.nbytes].view(own.dtype).view(own.shape)
    copy.copy_(own, non_blocking=True)
    if not isinstance(tensor, DTensor):
        return copy
    # `from_local` would move it to the mesh's device
    return DTensor(copy, tensor._spec, requires_grad=tensor.requires_grad)


@dataclass(frozen=True)
class HostBlocks:
    """Of one engine."""

    weights: HostBlock = field(default_factory=HostBlock)
    moments: HostBlock = field(default_factory=HostBlock)


@contextmanager
def resident(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    sharding: Sharding,
    device: torch.device,
    blocks: HostBlocks,
) -> Iterator[None]:
    """Within, what the config offloads is on the device; after, it is in host memory.

    On the CPU that is one place. What a call leaves free stays with torch, for the next role of the
    process; an engine that takes memory beside torch has it given back.
    """
    moved = module if sharding.param_offload else None
    optimizer = optimizer if sharding.optimizer_offload else None
    if device.type == "cpu":
        yield
        return

    fetch = partial(_fetched, device=device)
    _move(moved, optimizer, fetch, fetch)
    try:
        yield
    finally:
        weights = blocks.weights.copies_of(_tensors(moved))
        moments = blocks.moments.copies_of(_states(optimizer))
        if weights or moments:
            torch.cuda.current_stream(device).synchronize()  # FSDP reads what it pads
        _move(moved, optimizer, lambda one: weights[id(one)], lambda one: moments[id(one)])


def _fetched(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=local_part(tensor).is_pinned())


def _move(
    module: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    weight: Callable[[Tensor], Tensor],
    state: Callable[[Tensor], Tensor],
) -> None:
    """Have what these functions give in the place of each tensor."""
    if module is not None:
        module._apply(weight)
    for states in optimizer.state.values() if optimizer is not None else ():
        for name, value in states.items():
            if _is_moved(value):
                states[name] = state(value)


def _tensors(module: nn.Module | None) -> list[Tensor]:
    if module is None:
        return []
    weights = [*module.parameters()]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    return [*weights, *gradients, *module.buffers()]


def _states(optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    states = [] if optimizer is None else [*optimizer.state.values()]
    return [value for state in states for value in state.values() if _is_moved(value)]


def _is_moved(value: object) -> bool:
    """Whether a state is a tensor; step counts stay where AdamW wants them."""
    return isinstance(value, Tensor) and math.prod(value.shape) > 1
