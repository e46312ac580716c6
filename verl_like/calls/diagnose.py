"""Diagnosis of waits: the stacks of processes, and who waits for whom.

While the driver waits for a call that takes longer than usual, a `HangWatch` reads the Python
stacks of its pool every 5 s. If the ranks show the same stacks twice, and are in a collective, at a
lock, or do not answer, a warning explains who waits for whom. `describe_late_call` explains a call
that has passed its deadline (`verl_like.calls.deadlines`).

`stacks_of_calls` runs in a worker, outside its queue of calls. If native code holds the
interpreter, the process's `faulthandler` still answers a signal, which `stack_by_signal` sends to a
process of this machine. Only processes with a log have this handler (`verl_like.process.host`).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import CodeType
from typing import Protocol

from verl_like.calls.deadlines import STACKS_S
from verl_like.errors import join_few

logger = logging.getLogger(__name__)
SIGNAL = signal.SIGUSR1
LOOK_EVERY_S = 5.0
"""Seconds between two reads of a pool's stacks while the driver waits for it."""
SHOWN_STACKS = 8
"""Maximum number of different stacks in a message; the rarest ones are first."""
NAMED_SPANS = 16
"""Maximum number of rank spans in a message."""


# --------------------------------------------------------------------------- stacks of one process


def stacks_of_calls(loop: asyncio.AbstractEventLoop | None, runs_calls: CodeType) -> str:
    """Return the stacks of this process's calls and coroutines, newest frame last.

    A thread is in a call if the code `runs_calls` is on its stack.
    """
    asking = threading.get_ident()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        codes = (caller.f_code for caller, _ in traceback.walk_stack(frame))
        if ident != asking and runs_calls in codes:
            text = "".join(traceback.format_stack(frame))
            parts.append(f"thread {names.get(ident, ident)}:\n{text}")
    if loop is not None:
        for task in asyncio.all_tasks(loop):
            text_of_task = io.StringIO()
            task.print_stack(file=text_of_task)
            parts.append(f"coroutine:\n{text_of_task.getvalue()}")
    collective = _gpu_collective()
    if collective:
        parts.append(collective)
    return "\n".join(parts) or "idle: no call is running"


def _gpu_collective() -> str:
    """Describe the oldest collective that this process's GPU has not finished; "" if there is none.

    NCCL does not run on Python's stack, so torch's flight recorder is read. Sends and receives are
    left out, because the record does not say which belong together.
    """
    dump = getattr(sys.modules.get("torch._C._distributed_c10d"), "_dump_nccl_trace_json", None)
    if dump is None:
        return ""
    for entry in json.loads(dump(includeCollectives=True, onlyActive=True)).get("entries", []):
        if entry["state"] != "completed" and not entry.get("is_p2p"):
            name = entry["profiling_name"].rpartition(":")[2]
            group = " ".join(entry["process_group"])
            return f"NCCL: {name}, number {entry['collective_seq_id']} of group {group}"
    return ""


def stack_by_signal(pid: int, file: Path) -> str | None:
    """Send the signal to a process on this machine, and return the stacks that it writes to `file`.

    Return None if it writes nothing within a second.
    """
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
                        "(read by signal: native code blocks the "
                        f"interpreter)\n{_newest_last(written.read())}"
                    )
    return None


def _newest_last(text: str) -> str:
    """Reverse the frames of each thread: `faulthandler` puts the newest one first."""
    blocks: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("  ") and blocks:
            blocks[-1].insert(1, line)
        else:
            blocks.append([line])
    return "\n".join(line for block in blocks for line in block)


# ------------------------------------------------------------------------ who waits for whom, where

_COLLECTIVES = (
    r"all_reduce|all_gather\w*|reduce_scatter\w*|broadcast\w*|barrier|all_to_all\w*|reduce|"
    r"gather\w*|scatter\w*|send\w*|recv\w*|monitored_barrier|init_process_group|"
    r"open_process_group"
)
_COLLECTIVE = re.compile(rf'File "[^"]+", line \d+,? in (?P<name>{_COLLECTIVES})$', re.MULTILINE)
_ON_GPU = re.compile(r"^NCCL: (?P<name>\w+), (?P<place>.+)$", re.MULTILINE)
_FRAME = re.compile(r'File "([^"]+)", line (\d+),? in (\S+)')
_LOCKS = re.compile(r"/(threading|queue)\.py$")
_LOCK_LINE = re.compile(r"\.(acquire|wait)\(|^with [\w.]+:")


def who_waits(stacks: Mapping[int, str], ranks: Sequence[int]) -> str:
    """Explain who of these ranks waits for whom, by the stacks of their pool; "" if none waits."""
    silent = [rank for rank in ranks if rank not in stacks]
    if silent:
        return (
            f"{describe_ranks(silent)} does not answer (its process is stopped, swapping, or in "
            "native code)."
        )

    entered = {rank: _collective_of(stack) for rank, stack in stacks.items()}
    where = {rank: place for rank, place in entered.items() if place}
    absent = [rank for rank in stacks if rank not in where]
    places = _by_place(where)
    if len(set(where.values())) > 1:
        return f"the ranks are in different collectives and wait for each other: {places}."
    if where and absent:
        return f"{places} waits in a collective that {describe_ranks(absent)} never entered."
    if where:
        missing = "a rank outside this group, or the network, is missing"
        return f"all ranks are in the same collective ({places}): {missing}."

    places_of = {rank: _lock_of(stacks[rank]) for rank in ranks}
    locks = {rank: place for rank, place in places_of.items() if place}
    if locks:
        return (
            f"{_by_place(locks)} waits for a lock, an event or a queue of its own process. Its "
            "stack shows which thread should release it."
        )
    return ""


def likely_cause(stacks: Mapping[int, str], ranks: Sequence[int]) -> str:
    """Return the likely cause why these ranks are late, from the stacks of their pool."""
    computing = f"{describe_ranks(ranks)} is still computing (or sleeping). See its stack."
    return f"Likely cause: {who_waits(stacks, ranks) or computing}"


def ranks_alike(values: Mapping[int, str]) -> list[list[int]]:
    """Return the ranks of each value, the rarest value first."""
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, value in sorted(values.items()):
        alike[value].append(rank)
    return sorted(alike.values(), key=lambda ranks: (len(ranks), ranks))


def describe_ranks(ranks: Iterable[int]) -> str:
    """Return words such as `rank 3`, `rank 1, 2`, or `rank 0-511, 513-1023`."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [", ".join(map(str, run)) if len(run) < 3 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank {join_few(words, NAMED_SPANS)}"


def _by_place(place_of: Mapping[int, str]) -> str:
    alike = ranks_alike(place_of)
    return join_few([f"{describe_ranks(ranks)} in {place_of[ranks[0]]}" for ranks in alike])


def _collective_of(stack: str) -> str:
    """Return a rank's collective and the frame outside torch that entered it, or ""."""
    on_gpu = _ON_GPU.search(stack)
    if on_gpu:
        return f"{on_gpu['name']} ({on_gpu['place']})"
    entered = list(_COLLECTIVE.finditer(stack))
    if not entered:
        return ""
    for file, line, name in reversed(_FRAME.findall(stack[: entered[-1].start()])):
        if "/torch/" not in file and "/contextlib.py" not in file:
            return f"{entered[-1]['name']} ({name}, {file.rsplit('/', 1)[-1]}:{line})"
    return f"{entered[-1]['name']} (torch.distributed)"


def _lock_of(stack: str) -> str | None:
    """Return the function that waits for another thread of its process, or None."""
    frames = list(_FRAME.finditer(stack))
    if not frames:
        return None
    source = stack[frames[-1].end() :].strip()
    if not (_LOCKS.search(frames[-1][1]) or _LOCK_LINE.search(source)):
        return None
    file, line, name = next(
        (frame.groups() for frame in reversed(frames) if not _LOCKS.search(frame[1])),
        frames[-1].groups(),
    )
    return f"{name}, {file.rsplit('/', 1)[-1]}:{line}"


class StackSource(Protocol):
    """The part of a transport's interface that this module uses."""

    world_size: int

    def describe(self, rank: int, role: str | None = None) -> str:
        """Describe a rank for messages."""

    def stacks(self, seconds: float) -> dict[int, str]:
        """Return the Python stack of every process that responds in that time."""


def describe_late_call(
    summary: str, cause: str, stacks: Mapping[int, str], transport: StackSource
) -> str:
    """Describe a wait that hangs: summary, likely cause, and the stacks of the ranks.

    At most `SHOWN_STACKS` different stacks are shown.
    """
    lines = [summary, cause]
    shown = {rank: stacks.get(rank, "no answer") for rank in range(transport.world_size)}
    alike = ranks_alike(shown)
    for ranks in alike[:SHOWN_STACKS]:
        first, *others = ranks
        same = f", and of {describe_ranks(others)} the same" if others else ""
        lines.append(f"--- stack of {transport.describe(first)}{same}\n{shown[first]}")
    rest = alike[SHOWN_STACKS:]
    if rest:
        lines.append(f"--- {len(rest)} other stacks, of {describe_ranks(chain(*rest))}")
    return "\n".join(lines)


class HangWatch:
    """Explains why the calls on one pool do not end, while the driver waits for them.

    A pool is stuck if its ranks show the same stacks in two looks, 5 s apart. If a late rank is in
    a collective, waits for a lock, or does not respond, a warning explains who waits for whom, with
    the stacks. Ranks that only compute cause no warning. Each look has its own thread, so the
    driver does not wait for a process that does not respond.
    """

    def __init__(self, transport: StackSource, since: float) -> None:
        """The first look comes `LOOK_EVERY_S` after `since`, a reading of `time.monotonic`."""
        self._transport = transport
        self._next_look = since + LOOK_EVERY_S
        self._looking: threading.Thread | None = None
        self._stacks: dict[int, str] | None = None
        self._explained: dict[int, str] | None = None

    def look_if_due(self, late: Mapping[str, Sequence[int]]) -> None:
        """Read the stacks if it is time; `late` maps a call's name to the ranks it waits for."""
        now, is_looking = time.monotonic(), self._looking is not None and self._looking.is_alive()
        if late and now >= self._next_look and not is_looking:
            self._next_look, arguments = now + LOOK_EVERY_S, (dict(late),)
            self._looking = threading.Thread(target=self._look, args=arguments, daemon=True)
            self._looking.start()

    def _look(self, late: Mapping[str, Sequence[int]]) -> None:
        before, self._stacks = self._stacks, self._transport.stacks(STACKS_S)
        if self._stacks != before or self._stacks == self._explained:
            return
        ranks = sorted(set(chain(*late.values())))
        cause = who_waits(self._stacks, ranks)
        if cause:
            self._explained = self._stacks
            names = [self._transport.describe(rank) for rank in ranks]
            summary = (
                f"{', '.join(late)}: {join_few(names)} made no progress for {LOOK_EVERY_S:g} s."
            )
            logger.warning(
                "%s",
                describe_late_call(
                    summary, f"Likely cause: {cause}", self._stacks, self._transport
                ),
            )
