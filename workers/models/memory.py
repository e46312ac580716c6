"""Memory in use, under verl's names: of this process's GPU, and of its machine."""

from __future__ import annotations

import torch

from verl_like.process.machine import memory_gb


def memory_in_use(device: torch.device) -> dict[str, float]:
    """Return memory in GiB, of the GPU and of the whole machine.

    For a GPU, these are the peaks since the process started: memory of tensors, and memory reserved
    by the allocator. For the machine, it is the memory in use now (Linux only).
    """
    metrics = {}
    if device.type == "cuda":
        allocated = torch.cuda.max_memory_allocated(device)
        reserved = torch.cuda.max_memory_reserved(device)
        metrics["perf/max_memory_allocated_gb"] = allocated / 2**30
        metrics["perf/max_memory_reserved_gb"] = reserved / 2**30

    total, available = memory_gb("MemTotal:"), memory_gb("MemAvailable:")
    if total is not None and available is not None:
        metrics["perf/cpu_memory_used_gb"] = total - available
    return metrics
