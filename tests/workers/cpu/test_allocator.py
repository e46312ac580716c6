"""Large memory that is allocated repeatedly does not grow the heap."""

from __future__ import annotations

import ctypes

import pytest
import torch

from tests import ROOT
from tests.forked import run_program
from verl_like.process.info import OWN_PROCESS
from workers.cpu import allocator
from workers.cpu.allocator import keep_freed_memory
from workers.training.build import prepare_cpu_process
from workers.weights.channel import allocate_buffer

BUFFER, SYNCS = 2**24, 30
FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Mallinfo(ctypes.Structure):
    """The result of glibc's `mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS.split()]


def bytes_of_heap() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = Mallinfo
    return int(mallinfo().arena)


def print_growth() -> None:
    """Print, in the fork, the growth of the heap after the buffers of so many syncs."""
    assert keep_freed_memory()
    settled = []
    before = bytes_of_heap()
    for _ in range(SYNCS):
        room = allocate_buffer(BUFFER)
        del room
        settled.append(torch.empty(2**18, dtype=torch.uint8))
    print(bytes_of_heap() - before)


def test_buffers_of_syncs_do_not_lengthen_the_heap() -> None:
    done = run_program(print_growth, folder=ROOT)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2 * BUFFER


@pytest.mark.parametrize("is_ours", [True, False])
def test_the_allocator_of_a_notebook_stays(is_ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(allocator, "keep_freed_memory", lambda: called.append(1))
    monkeypatch.delenv(OWN_PROCESS, raising=False)
    if is_ours:
        monkeypatch.setenv(OWN_PROCESS, "1")
    prepare_cpu_process()
    assert bool(called) == is_ours
