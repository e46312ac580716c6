"""Bytes of torch's CPU tensors: those in use, and the peak during a call."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def live_bytes() -> int:
    """Return the bytes of all tensors that Python references."""
    gc.collect()
    tensors = (
        item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)
    )
    storages = {
        storage.data_ptr(): storage for storage in map(torch.Tensor.untyped_storage, tensors)
    }
    return sum(storage.nbytes() for address, storage in storages.items() if address)


def peak_bytes(call: Callable[[], Any]) -> tuple[Any, int]:
    """Return the result of the call, and its peak memory beyond what was in use before.

    The numbers are those of the allocator for this thread, so temporaries inside operations count.
    Memory that a thread of gloo frees is not seen.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = recorded.profiler.kineto_results.events()
    in_time = sorted(events, key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in in_time if event.name() == "[memory]"]
    assert sizes, "the profiler saw no allocation"
    return result, max(0, *itertools.accumulate(sizes))
