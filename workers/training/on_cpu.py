"""CPU-only setup of a training engine: its kernels are imported only on a CPU."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager

from torch import nn

from verl_like.process.environment import OWN_PROCESS


def prepare_cpu_process() -> None:
    """Prepare a process that trains on the CPU, before it computes anything.

    The allocator of a process that is not ours, such as a notebook, stays unchanged.
    """
    from workers.cpu.allocator import keep_freed_memory
    from workers.cpu.onednn import limit_kernel_caches

    if OWN_PROCESS in os.environ:
        keep_freed_memory()
    limit_kernel_caches()


def cpu_kernels(module: nn.Module) -> AbstractContextManager[None]:
    """Context in which linear layers of the module use oneDNN."""
    from workers.cpu.linear import onednn_linears

    return onednn_linears(module)
