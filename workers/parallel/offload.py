"""Offload weights, gradients and moments to host memory between calls, in page-locked blocks."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from workers.parallel.placements import local_part
from workers.parallel.sharding import Sharding

logger = logging.getLogger(__name__)
ALIGNMENT = 256
"""Offsets of tensors in a block are multiples of this many bytes."""


class HostBlock:
    """One page-locked block that stores tensors one after the other."""

    def __init__(self) -> None:
        self.bytes = torch.empty(0, dtype=torch.uint8)
        """The buffer grows when needed and is reused."""
        self._unlock: Callable[[], object] | None = None

    def copies_of(self, tensors: Sequence[Tensor]) -> dict[int, Tensor]:
        """Start copying the tensors; return the copies by id. Earlier copies become invalid."""
        sizes = [-(-local_part(t).nbytes // ALIGNMENT) * ALIGNMENT for t in tensors]
        if sum(sizes) > len(self.bytes):
            if self._unlock is not None:
                self._unlock()
            self.bytes = torch.empty(sum(sizes), dtype=torch.uint8)
            self._unlock = lock_pages(self, self.bytes)

        places = self.bytes[: sum(sizes)].split(sizes)
        return {id(t): _copy(t, place) for t, place in zip(tensors, places, strict=True)}


@torch.no_grad()
def _copy(tensor: Tensor, place: Tensor) -> Tensor:
    local = local_part(tensor)
    copy = place[: local.nbytes].view(local.dtype).view(local.shape)
    copy.copy_(local, non_blocking=True)
    if not isinstance(tensor, DTensor):
        return copy
    # `from_local` would move it to the device of the mesh
    return DTensor(copy, tensor._spec, requires_grad=tensor.requires_grad)


@dataclass(frozen=True)
class HostBlocks:
    """The host blocks of one engine."""

    weights: HostBlock = field(default_factory=HostBlock)
    """Weights, their gradients, and buffers."""
    moments: HostBlock = field(default_factory=HostBlock)


@contextmanager
def resident(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    sharding: Sharding,
    device: torch.device,
    blocks: HostBlocks,
) -> Iterator[None]:
    """Context in which offloaded tensors are on the device; afterwards they are in host memory.

    On a CPU, device and host memory are the same. torch caches the memory that a call frees, for
    the next role of the process. An engine that allocates memory outside torch makes torch release
    the cache.
    """
    if device.type == "cpu":
        yield
        return

    def fetch(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=local_part(tensor).is_pinned())

    moved = module if sharding.param_offload else nn.Module()
    optimizer = optimizer if sharding.optimizer_offload else None
    moved._apply(fetch)
    for states, name in _moments(optimizer):
        states[name] = fetch(states[name])
    try:
        yield
    finally:
        parameters, moments = list(moved.parameters()), _moments(optimizer)
        gradients = [weight.grad for weight in parameters if weight.grad is not None]
        weights_here = blocks.weights.copies_of([*parameters, *gradients, *moved.buffers()])
        moments_here = blocks.moments.copies_of([states[name] for states, name in moments])
        if weights_here or moments_here:
            torch.cuda.current_stream(device).synchronize()  # FSDP pads and reads these buffers
        moved._apply(lambda weight: weights_here[id(weight)])
        for states, name in moments:
            states[name] = moments_here[id(states[name])]


def _moments(optimizer: torch.optim.Optimizer | None) -> list[tuple[dict[str, Tensor], str]]:
    """Return the places of states of several elements; step counts stay where AdamW needs them."""
    if optimizer is None:
        return []
    return [
        (states, name)
        for states in optimizer.state.values()
        for name, value in states.items()
        if isinstance(value, Tensor) and math.prod(value.shape) > 1
    ]


def lock_pages(owner: object, block: Tensor) -> Callable[[], object] | None:
    """Page-lock these bytes until the returned function is called or their owner is deleted.

    Returns None, with a warning, if CUDA fails. torch's `pin_memory` would round up to a power of
    two.
    """
    cudart, address = torch.cuda.cudart(), block.data_ptr()
    error = int(cudart.cudaHostRegister(address, len(block), 0))
    if error:
        size = len(block) / 2**30
        message = "%.2f GiB were not page-locked (CUDA error %d), so copies to the GPU are slower"
        logger.warning(message, size, error)
        return None
    unlock = weakref.finalize(owner, cudart.cudaHostUnregister, address)
    unlock.atexit = False  # CUDA may already be shut down at exit
    return unlock


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small new tensor to the device, without waiting for a GPU."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
