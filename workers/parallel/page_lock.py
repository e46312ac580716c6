"""Page-locked host memory: a GPU copies from and to it at the bus's full speed, without waiting."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def lock_pages(owner: object, block: Tensor) -> Callable[[], object] | None:
    """Lock the pages of these bytes until the result is called or their owner is gone.

    None if CUDA refuses, which is said. torch's own `pin_memory` takes the next power of two.
    """
    cudart, address = torch.cuda.cudart(), block.data_ptr()
    if error := int(cudart.cudaHostRegister(address, len(block), 0)):
        size = len(block) / 2**30
        logger.warning("%.2f GiB were not page-locked: CUDA error %d", size, error)
        return None
    unlock = weakref.finalize(owner, cudart.cudaHostUnregister, address)
    unlock.atexit = False  # CUDA may be gone by then
    return unlock


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; the program does not wait for a GPU. For what is small and made anew."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
