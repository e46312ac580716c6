"""Page-locked host memory: GPUs copy from and to it at full bus speed, asynchronously."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


def lock_pages(owner: object, block: Tensor) -> Callable[[], object] | None:
    """Lock the pages of these bytes until the result is called or their owner is deleted.

    Returns None, with a warning, if CUDA fails. torch's `pin_memory` would round up to a power of
    two.
    """
    cudart, address = torch.cuda.cudart(), block.data_ptr()
    if error := int(cudart.cudaHostRegister(address, len(block), 0)):
        size = len(block) / 2**30
        logger.warning("%.2f GiB were not page-locked: CUDA error %d", size, error)
        return None
    unlock = weakref.finalize(owner, cudart.cudaHostUnregister, address)
    unlock.atexit = False  # CUDA may be gone at exit
    return unlock


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small new tensor to the device, without waiting for a GPU."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
