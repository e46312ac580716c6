"""Large memory that is allocated repeatedly does not grow the heap."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests.workers.distributed import run
from verl_like.process.info import OWN_PROCESS
from workers.cpu import allocator
from workers.cpu.allocator import keep_freed_memory
from workers.training.build_model import prepare_cpu_process
from workers.weights.channel import allocate_buffer

BUFFER, SYNCS = 2**24, 30
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Mallinfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def heap_info() -> Mallinfo:
    """Return glibc's statistics of this process's heap."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    info: Mallinfo = mallinfo()
    return info


def growth_by_sync_buffers() -> int:
    """Return the growth of this process's heap by the buffers of `SYNCS` syncs."""
    assert keep_freed_memory()
    small_tensors = []
    before = heap_info().arena
    for _ in range(SYNCS):
        buffer = allocate_buffer(BUFFER)
        del buffer
        small_tensors.append(torch.empty(2**18, dtype=torch.uint8))
    return int(heap_info().arena - before)


def test_sync_buffers_do_not_grow_the_heap() -> None:
    (growth,) = run(1, growth_by_sync_buffers)
    assert growth < 2 * BUFFER


@pytest.mark.parametrize("is_ours", [True, False])
def test_only_our_own_processes_change_the_allocator(
    is_ours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[int] = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: called.append(1))
    monkeypatch.delenv(OWN_PROCESS, raising=False)
    if is_ours:
        monkeypatch.setenv(OWN_PROCESS, "1")
    prepare_cpu_process()
    assert bool(called) == is_ours
