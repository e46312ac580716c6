"""Python stacks of worker processes: how a process shows its own, and what they say of a deadlock.

`stacks_of_calls` runs in a worker, past its queue of calls. Where the interpreter itself is held by
native code, the process's `faulthandler` still answers a signal: `verl_like.process.host` arms it
and `stack_by_signal` sends it, to processes of this machine. `likely_cause` reads the stacks of all
ranks.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType

from verl_like.errors import few

SIGNAL = signal.SIGUSR1
NAMED_SPANS = 16
"""Of ranks that follow each other, in a message."""
_NAMES = (
    r"all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|all_to_all\w*|reduce|"
    r"gather\w*|scatter\w*|send\w*|recv\w*|monitored_barrier|init_process_group|"
    r"open_process_group"
)
_COLLECTIVE = re.compile(rf'File "[^"]+", line \d+,? in (?P<name>{_NAMES})$', re.MULTILINE)
_OF_GPU = re.compile(r"^NCCL: (?P<name>\w+), (?P<place>.+)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_LOCKS = re.compile(r"/(threading|queue)\.py$")
_LOCK_LINE = re.compile(r"\.(acquire|wait)\(|^with [\w.]+:")


def stacks_of_calls(loop: asyncio.AbstractEventLoop | None, runs_calls: CodeType) -> str:
    """The stacks of this process's calls and coroutines, newest frame last.

    A thread is in a call when the code `runs_calls` is on its stack.
    """
    asking = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != asking and is_inside(frame, runs_calls):
            text = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{text}")
    for task in asyncio.all_tasks(loop) if loop is not None else ():
        text_of_task = io.StringIO()
        task.print_stack(file=text_of_task)
        parts.append(f"coroutine:\n{text_of_task.getvalue()}")
    if collective := gpu_collective():
        parts.append(collective)
    return "\n".join(parts) or "idle: no call is running"


def gpu_collective() -> str:
    """The oldest collective that this process's GPU has not ended, in words; none is an empty text.

    NCCL runs beside Python, which may be anywhere: torch's flight recorder knows. Of sends and
    receives it is not known which belong together, so they are left out.
    """
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace_json", None)
    if dump is None:
        return ""
    entries = json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", [])
    waiting = [one for one in entries if one["state"] != "completed" and not one.get("is_p2p")]
    if not waiting:
        return ""
    oldest = waiting[0]
    name = oldest["profiling_name"].rpartition(":")[2]
    group = " ".join(oldest["process_group"])
    return f"NCCL: {name}, number {oldest['collective_seq_id']} of group {group}"


def is_inside(frame: FrameType | None, code: CodeType) -> bool:
    """Whether a function's code is on the stack that ends in this frame."""
    while frame is not None:
        if frame.f_code is code:
            return True
        frame = frame.f_back
    return False


def waits_for_a_thread(file: str, line: str) -> bool:
    """Whether a stack whose innermost line is this one waits for a lock, an event or a queue."""
    return bool(_LOCKS.search(file) or _LOCK_LINE.search(line))


def stack_by_signal(pid: int, file: Path) -> str | None:
    """What a process on this machine writes into its crash log when it gets the signal."""
    before = file.stat().st_size if file.exists() else 0
    with contextlib.suppress(OSError):
        os.kill(pid, SIGNAL)
        for _ in range(10):
            time.sleep(0.1)
            if file.exists() and file.stat().st_size > before:
                time.sleep(0.1)
                with open(file, encoding="utf-8", errors="replace") as written:
                    written.seek(before)
                    return (
                        "(asked by signal: the interpreter is held by native code)\n"
                        f"{_newest_last(written.read())}"
                    )
    return None


def likely_cause(stacks: dict[int, str], ranks: Sequence[int]) -> str:
    """One sentence on why ranks do not come back, read off their stacks."""
    silent = [rank for rank in ranks if rank not in stacks]
    if silent:
        return (
            f"Likely cause: {ranks_in_words(silent)} does not answer (its process is stopped, "
            "swapping, or in native code)."
        )

    where: dict[int, tuple[str, str]] = {}
    for rank, stack in stacks.items():
        found = list(_COLLECTIVE.finditer(stack))
        if on_gpu := _OF_GPU.search(stack):
            where[rank] = on_gpu["name"], on_gpu["place"]
        elif found:
            where[rank] = found[-1]["name"], _caller_of(stack, found[-1].start())

    places = _by_place({rank: f"{name} ({place})" for rank, (name, place) in where.items()})
    absent = [rank for rank in stacks if rank not in where]

    if len(set(where.values())) > 1:
        return (
            "Likely cause: the ranks are in different collectives and wait for each other: "
            f"{places}."
        )
    if where and absent:
        return (
            f"Likely cause: {places} waits in a collective that {ranks_in_words(absent)} never "
            "entered."
        )
    if where:
        missing = "a rank outside this group, or the network, is missing"
        return f"Likely cause: all ranks are in the same collective ({places}): {missing}."

    locks = _by_place({rank: place for rank in ranks if (place := _lock_of(stacks[rank]))})
    if locks:
        return (
            f"Likely cause: {locks} waits for a lock, an event or a queue of its own "
            "process; see its stack for who should end that."
        )
    return f"Likely cause: {ranks_in_words(ranks)} is still computing (or sleeping); see its stack."


def ranks_alike(values: Mapping[int, str]) -> list[list[int]]:
    """The ranks of each value, the rarest value first: of a thousand ranks, the odd one tells."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):
        alike[value].append(rank)
    return sorted(alike.values(), key=lambda ranks: (len(ranks), ranks))


def ranks_in_words(ranks: Iterable[int]) -> str:
    """`rank 3`, `rank 1, 2`, `rank 0-511, 513-1023`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank {few(words, NAMED_SPANS)}"


def _by_place(place_of: Mapping[int, str]) -> str:
    alike = ranks_alike(place_of)
    return few([f"{ranks_in_words(ranks)} in {place_of[ranks[0]]}" for ranks in alike])


def _lock_of(stack: str) -> str | None:
    """The function that waits for another thread of its process; None if none does."""
    frames = list(_FRAME.finditer(stack))
    if not frames:
        return None
    source = stack[frames[-1].end() :].strip()
    if not waits_for_a_thread(frames[-1][1], source):
        return None
    file, line, name = next(
        (frame.groups() for frame in reversed(frames) if not _LOCKS.search(frame[1])),
        frames[-1].groups(),
    )
    return f"{name}, {file.rsplit('/', 1)[-1]}:{line}"


def _caller_of(stack: str, position: int) -> str:
    """The frame outside torch that entered the collective."""
    for file, line, name in reversed(_FRAME.findall(stack[:position])):
        if "/torch/" not in file and "/contextlib.py" not in file:
            return f"{name}, {file.rsplit('/', 1)[-1]}:{line}"
    return "torch.distributed"


def _newest_last(text: str) -> str:
    """`faulthandler` puts the newest frame first, everybody else last."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("  ") and blocks:
            blocks[-1].insert(1, line)
        else:
            blocks.append([line])
    return "\n".join(line for block in blocks for line in block)
