"""Bytes of torch's tensors on the CPU: those that are there, and the most in a call."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def live_bytes() -> int:
    """Of all tensors that Python has."""
    gc.collect()
    tensors = (
        each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)
    )
    storages = {
        storage.data_ptr(): storage for storage in map(torch.Tensor.untyped_storage, tensors)
    }
    return sum(storage.nbytes() for address, storage in storages.items() if address)


def peak_bytes(call: Callable[[], Any]) -> tuple[Any, int]:
    """What the call returns, and the most that it holds at a time beside what there was before.

    Temporaries inside operations count: these are the allocator's own figures, of this thread. What
    a thread of gloo's frees is missed.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    events = recorded.profiler.kineto_results.events()
    in_time = sorted(events, key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in in_time if event.name() == "[memory]"]
    assert sizes, "the profiler saw no allocation"
    return result, max(0, *itertools.accumulate(sizes))
