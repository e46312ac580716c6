"""Memory that is in use, under verl's names: of this process's GPU, and of its machine.

`workers.roles.actor` logs it.
"""

from __future__ import annotations

import torch

from verl_like.process.machine import memory_gb


def memory_in_use(device: torch.device) -> dict[str, float]:
    """In GiB: the most since the process started that tensors took and that the allocator kept,
    where there is a GPU;

    what the whole machine has in use now, where it tells (Linux).
    """
    total, available = memory_gb("MemTotal:"), memory_gb("MemAvailable:")
    machine = (
        {} if total is None or available is None else {"perf/cpu_memory_used_gb": total - available}
    )
    if device.type != "cuda":
        return machine
    return {
        "perf/max_memory_allocated_gb": torch.cuda.max_memory_allocated(device) / 2**30,
        "perf/max_memory_reserved_gb": torch.cuda.max_memory_reserved(device) / 2**30,
        **machine,
    }
