"""Host memory that another process can map, and that GPUs copy into while this one goes on.

There is one for each file of a checkpoint that is written in the background.
"""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class HostBuffer:
    """Bytes that grow when more are needed, and stay."""

    def __init__(self) -> None:
        """There is no memory yet."""
        self.descriptor = _anonymous_file()
        """What another process maps."""
        self.bytes: Tensor = torch.empty(0, dtype=torch.uint8)
        self._unpin: Callable[[], object] | None = None
        weakref.finalize(self, os.close, self.descriptor)

    def hold(self, num_bytes: int, pinned: bool) -> None:
        """Have at least so many bytes, page-locked if `pinned`; they may be others than before."""
        if num_bytes > len(self.bytes):
            if self._unpin is not None:
                self._unpin()
                self._unpin = None
            os.ftruncate(self.descriptor, num_bytes)
            self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, num_bytes), dtype=torch.uint8)
        if pinned and self._unpin is None:
            self._pin()

    def view(self, num_bytes: int) -> memoryview:
        """The first bytes."""
        return memoryview(self.bytes.numpy())[:num_bytes]

    def _pin(self) -> None:
        cudart, address = torch.cuda.cudart(), self.bytes.data_ptr()
        error = int(cudart.cudaHostRegister(address, len(self.bytes), 0))
        if error:
            size = len(self.bytes) / 2**30
            logger.warning("%.2f GiB were not page-locked: CUDA error %d", size, error)
            return
        unpin = weakref.finalize(self, cudart.cudaHostUnregister, address)
        unpin.atexit = False  # CUDA may be gone by then
        self._unpin = unpin


def _anonymous_file() -> int:
    """A file in memory without a name; where the system knows none, one on the disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
