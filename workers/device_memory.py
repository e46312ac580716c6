"""The most memory that this process has held on its GPU, under verl's names. `workers.actor` logs it."""

from __future__ import annotations

import torch


def memory_peaks(device: torch.device) -> dict[str, float]:
    """Peaks since the process started, in GiB: what tensors took, and what the allocator kept; none on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / 2**30,
    }
