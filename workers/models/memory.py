"""Memory that is in use, under verl's names: of this process's GPU, and of its machine."""

from __future__ import annotations

import torch

from verl_like.process.machine import memory_gb


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Memory in GiB, of the GPU and of the whole machine.

    Of a GPU, the most since the process started that tensors took, and that the allocator kept. Of
    the machine, what is in use now, where it tells (Linux).
    """
    found = {}
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        found["perf/max_memory_allocated_gb"] = allocated / 2**30
        found["perf/max_memory_reserved_gb"] = reserved / 2**30

    total, available = memory_gb("MemTotal:"), memory_gb("MemAvailable:")
    if total is not None and available is not None:
        found["perf/cpu_memory_used_gb"] = total - available
    return found
