"""Whether a worker process makes progress: what its driver asks while it waits for a call.

A thread that waits for a lock or for other ranks sleeps in a futex of the kernel: it has the same
stack, the same system call and the same count of wake-ups whenever somebody looks. A thread that
computes, sleeps for a while, reads a file or talks to a server does not look so.
`verl_like.calls.deadlock` compares what processes say in a row. A GPU waits for other ranks
whatever its process does: that is read from torch's record of NCCL's collectives.
"""

from __future__ import annotations

import asyncio
import linecache
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

from verl_like.calls.stacks import gpu_collective, is_inside, waits_for_a_thread
from verl_like.process.machine import children, cpu_s_of

PIPE = "pipe"
"""Waits for the driver's connection, or reads its requests."""
REQUEST = "request"
"""Answers one of them, beside the queue of calls."""
COROUTINES = "coroutines"
"""Runs the loop of the methods that are coroutines."""
OWN_THREADS = (PIPE, REQUEST, COROUTINES)
"""Names of the threads that serve a driver beside its calls. They sleep whatever a call does, so
they are left out; one with another name would count as a thread that still works.
"""
IDLE, IN_COLLECTIVE, AT_LOCK, ELSEWHERE = "idle", "collective", "lock", "elsewhere"
FUTEX = {"x86_64": "202 ", "aarch64": "98 "}.get(platform.machine(), "unknown")
"""How the kernel's line about a thread in this system call begins."""
_COLLECTIVES = re.compile(r"/torch/distributed/(?!checkpoint|elastic|rendezvous|launcher|rpc)")


@dataclass(frozen=True)
class Progress:
    """What a process is doing; one that stands still says the same again and again."""

    num_calls: int
    """How many calls it has begun."""
    waits: str
    """Where its call is: `IDLE` without one, `IN_COLLECTIVE`, `AT_LOCK`, or `ELSEWHERE`: it may be
    working, or waiting for somebody outside of the run."""
    stack: str = ""
    """Files and lines of the call, or the collective of its GPU: the same on any rank there."""
    wakeups: str = ""
    """Of all threads that the call may be waiting for; with a collective of its GPU, the stack."""
    cpu_s: float = 0.0
    """Of the process and its children."""


def progress_of_call(
    num_calls: int, runs_calls: CodeType, loop: asyncio.AbstractEventLoop | None
) -> Progress:
    """What this process is doing, asked in a thread of its own.

    Its call is in the thread that has the code `runs_calls` on its stack.
    """
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    calling = [ident for ident, frame in frames.items() if is_inside(frame, runs_calls)]
    if not calling:
        return Progress(num_calls, IDLE)
    stack = " ".join(_places(frames[calling[0]]))
    cpu_s = time.process_time() + sum(map(cpu_s_of, children(os.getpid())))
    if len(calling) > 1 or (loop is not None and asyncio.all_tasks(loop)):
        return Progress(num_calls, ELSEWHERE, stack, cpu_s=cpu_s)
    if collective := gpu_collective():
        # a thread that waits for a GPU may spin: what it uses of a core is no sign of work
        return Progress(num_calls, IN_COLLECTIVE, collective, wakeups=stack)

    threads = {thread.ident: thread for thread in threading.enumerate()}
    waits, wakeups = _where(frames[calling[0]]), []
    for ident in calling if waits == IN_COLLECTIVE else frames:
        thread = threads.get(ident)
        if ident not in calling and thread is not None and thread.name in OWN_THREADS:
            continue
        asleep = None if thread is None else _asleep(_number_of(thread))
        if asleep is None:
            return Progress(num_calls, ELSEWHERE, stack, cpu_s=cpu_s)
        wakeups.append(asleep)
    return Progress(num_calls, waits, stack, " ".join(wakeups), cpu_s)


def _where(frame: FrameType) -> str:
    """What the innermost function of a thread waits for, if it waits."""
    file = frame.f_code.co_filename
    if _COLLECTIVES.search(file):
        return IN_COLLECTIVE
    line = linecache.getline(file, frame.f_lineno or 0).strip()  # some code has no line
    return AT_LOCK if waits_for_a_thread(file, line) else ELSEWHERE


def _number_of(thread: threading.Thread) -> int | None:
    """The kernel's; a main thread that was forked still has that of its parent."""
    return os.getpid() if thread is threading.main_thread() else thread.native_id


def _asleep(thread: int | None) -> str | None:
    """The wait of a thread that sleeps in a futex, and how often it has woken up; else None."""
    folder = Path(f"/proc/self/task/{thread}")
    with suppress(OSError):  # it has ended, or the system does not say
        call = (folder / "syscall").read_text(encoding="utf-8")
        if call.startswith(FUTEX):
            status = (folder / "status").read_text(encoding="utf-8")
            counts = re.findall(r"ctxt_switches:\s*(\d+)", status)
            return f"{call.split()[1]}:{'+'.join(counts)}"
    return None


def _places(frame: FrameType | None) -> Iterator[str]:
    while frame is not None:
        yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
