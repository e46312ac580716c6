"""What a process says of its call: at a lock, in a collective, at work, or idle."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.verl_like.calls.threads_of_others import leave_out
from verl_like.calls.progress import (
    AT_LOCK,
    ELSEWHERE,
    IDLE,
    IN_COLLECTIVE,
    Progress,
    progress_of_call,
)


def make_call(work: Callable[[], object]) -> None:
    work()


@contextmanager
def calling(work: Callable[[], object], end: Callable[[], None]) -> Iterator[None]:
    """A call in a thread, as a worker makes it; `end` ends it."""
    thread = threading.Thread(target=make_call, args=(work,))
    thread.start()
    time.sleep(0.2)
    try:
        yield
    finally:
        end()
        thread.join(10)
        assert not thread.is_alive()


def found(monkeypatch: pytest.MonkeyPatch) -> Progress:
    """What a process with this call alone would say: the tests' own threads are left out."""
    others = [thread.name for thread in threading.enumerate() if "make_call" not in thread.name]
    leave_out(monkeypatch, *others)
    return progress_of_call(3, make_call.__code__, None)


def test_without_a_call_it_is_idle() -> None:
    assert progress_of_call(3, make_call.__code__, None) == Progress(3, IDLE)


def test_at_a_lock_it_says_the_same_until_it_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()
    with calling(end.wait, end.set):
        first, second = found(monkeypatch), found(monkeypatch)
    assert first.waits == AT_LOCK
    assert first.wakeups
    assert (first.stack, first.wakeups) == (second.stack, second.wakeups)


def test_a_wait_that_wakes_up_now_and_then_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    end = threading.Event()

    def polls() -> None:
        while not end.wait(0.05):
            pass

    def wakeups() -> str:
        """Of a look at which it was asleep, as it mostly is."""
        until = time.monotonic() + 20
        while not (seen := found(monkeypatch).wakeups):
            assert time.monotonic() < until
        return seen

    with calling(polls, end.set):
        first = wakeups()
        time.sleep(0.3)
        assert wakeups() != first


@pytest.mark.parametrize("waits", ["sleeps", "computes", "has a thread that sleeps"])
def test_whoever_works_or_may_be_waiting_for_somebody_outside_is_elsewhere(
    waits: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = threading.Event()

    def sleeps() -> None:
        while not end.is_set():
            time.sleep(0.4)

    def computes() -> None:
        while not end.is_set():
            sum(range(1000))

    def has_a_thread() -> None:
        helper = threading.Thread(target=sleeps, name="helper")
        helper.start()
        helper.join()

    work = {"sleeps": sleeps, "computes": computes}.get(waits, has_a_thread)
    leave_out(monkeypatch, "MainThread")
    with calling(work, end.set):
        assert progress_of_call(3, make_call.__code__, None).waits == ELSEWHERE


def record(*entries: tuple[str, int, str]) -> bytes:
    """What torch's flight recorder says of the collectives that have not ended, oldest first."""
    told = [
        {
            "profiling_name": f"nccl:{name}",
            "collective_seq_id": number,
            "process_group": ["0", "default_pg"],
            "state": state,
            "is_p2p": name == "send 0->1",
        }
        for name, number, state in entries
    ]
    return json.dumps({"entries": told}).encode()


def recorded(monkeypatch: pytest.MonkeyPatch, *entries: tuple[str, int, str]) -> None:
    monkeypatch.setattr(
        torch._C._distributed_c10d,
        "_dump_nccl_trace_json",
        lambda includeCollectives, onlyActive: record(*entries),
        raising=False,
    )


def test_a_call_whose_gpu_is_in_a_collective_waits_there_though_its_thread_spins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    synchronized = threading.Lock()

    def spins() -> None:
        # on one line of Python, as a thread in cuda's synchronize() is
        _ = {None for _ in iter(synchronized.locked, False)}

    recorded(monkeypatch, ("send 0->1", 3, "started"), ("all_reduce", 7, "scheduled"))
    synchronized.acquire()
    with calling(spins, synchronized.release):
        first, second = found(monkeypatch), found(monkeypatch)
    assert first == second
    assert first.waits == IN_COLLECTIVE
    assert first.stack == "NCCL: all_reduce, number 7 of group 0 default_pg"


def test_a_gpu_that_has_ended_its_collectives_waits_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = threading.Event()
    recorded(monkeypatch, ("all_reduce", 7, "completed"))
    with calling(end.wait, end.set):
        assert found(monkeypatch).waits == AT_LOCK
