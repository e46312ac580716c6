"""Confined processes: forked with limits, watched from outside, and killed with their children.

    supervise(socket, folder, sandbox, program)     # does not return

`supervise` forks a child that runs `program(descriptor of the socket)` in the folder, and
watches it. The watch ends if the child ends or stops, if a limit is exceeded, or if the other end
of the socket is closed. Then every process that the child has started is killed, whatever session
it is in, and the folder is removed. The other end receives the reason as a line `{"ended": words}`.
Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from fcntl import F_DUPFD, fcntl
from functools import partial
from typing import NoReturn

from verl_like.errors import ConfigError
from verl_like.process.family import descendants
from verl_like.process.kernel_limits import isolate_network
from verl_like.process.machine import IS_LINUX, proc_fields
from verl_like.process.sandbox import KILL_S, Sandbox, remove_folder

WATCH_S = 0.2
"""Seconds between two checks of the number of processes, their memory and their files."""
MAX_OUTPUT = 2**20
"""Bytes that a supervised process may print; later output is dropped."""
OUT_OF_TIME = "used up its processor time (cpu_s={0:g})"
PASSED_DEADLINE = "passed its deadline"
ENDED_WELL = "ended with exit code 0"
DATA = 3
"""The descriptor through which a confined program communicates."""

LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_F_GETPIPE_SZ = 1032  # fcntl names it only on Linux
_BLOCKS = 8
"""A file counts as at least this many blocks of 512 bytes."""


def supervise(
    starter: int,
    folder: str,
    sandbox: Sandbox,
    program: Callable[[int], None],
    prefix: bytes = b"",
    most_output: int = MAX_OUTPUT,
) -> NoReturn:
    """Run `program(DATA)` in a child of this process, which must have one thread.

    `DATA` is a copy of the socket `starter`. Each line that the child prints gets the prefix.
    """
    ending: str | None = None
    try:
        adopt_orphans()
        if not sandbox.network:
            isolate_network(" Otherwise, set network=true.")
        pipes = {1: os.pipe(), 2: os.pipe()}
        descriptors = {0: os.open(os.devnull, os.O_RDONLY), DATA: starter}
        descriptors |= {number: theirs for number, (_, theirs) in pipes.items()}
        child = fork_confined(folder, sandbox, descriptors, partial(program, DATA))
        for _, theirs in pipes.values():
            os.close(theirs)
        printed = _OutputForwarder(prefix, most_output)
        outputs = {ours: partial(printed.forward, number) for number, (ours, _) in pipes.items()}
        ending = watch(child, folder, sandbox, outputs, starter=starter)
    except ConfigError as err:
        ending = f"was rejected: {err}"
    finally:
        kill_descendants()
        if ending is not None:
            with contextlib.suppress(OSError):  # the other end is gone
                os.write(starter, b"\n%s\n" % json.dumps({"ended": ending}).encode())
        remove_folder(folder)
        os._exit(0)


class _OutputForwarder:
    """Forwards the output of a child, up to a limit."""

    def __init__(self, prefix: bytes = b"", most: int = MAX_OUTPUT) -> None:
        self._prefix, self._room = prefix, most
        self._is_in_line = False

    def forward(self, to: int, chunk: bytes) -> None:
        if self._room <= 0:
            return
        passed = chunk[: self._room]
        self._room -= len(chunk)
        if self._room <= 0:
            passed += b"\n[further output of this process is dropped]\n"
        if self._prefix:
            lines = passed.splitlines(keepends=True)
            begun, self._is_in_line = self._is_in_line, not passed.endswith(b"\n")
            passed = b"".join(self._prefix * (n > 0 or not begun) + x for n, x in enumerate(lines))
        with contextlib.suppress(OSError):  # a console whose reader is gone, or whose disk is full
            os.write(to, passed)


def fork_confined(
    folder: str, sandbox: Sandbox, descriptors: Mapping[int, int], program: Callable[[], None]
) -> int:
    """Fork a child that runs `program` in `folder`, and return its process id.

    `descriptors` maps the child's descriptors to ours.
    """
    parent = os.getpid()
    pid = os.fork()
    if pid != 0:
        return pid

    code = 1
    try:
        die_with_parent()
        if os.getppid() != parent:  # it died before the line above
            os._exit(code)
        os.setsid()
        first_free = max(descriptors) + 1  # dup2 below does not overwrite copies from here on
        copies = {to: fcntl(ours, F_DUPFD, first_free) for to, ours in descriptors.items()}
        for to, copy in copies.items():
            os.dup2(copy, to)
        os.closerange(first_free, os.sysconf("SC_OPEN_MAX"))
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        sandbox.confine()
        program()
        code = 0
    except SystemExit as err:
        code = 0 if err.code in (None, 0) else 1
    except BaseException:  # noqa: BLE001 - this is the edge of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def watch(
    child: int,
    folder: str,
    sandbox: Sandbox,
    outputs: Mapping[int, Callable[[bytes], str | None]],
    end: float = math.inf,
    starter: int | None = None,
) -> str | None:
    """Watch the child until it ends or exceeds a limit, and return the reason.

    Afterwards, none of the child's processes is left. Each function of `outputs` receives the
    output of a pipe and may return an error. Return None if the other end of the socket `starter`
    is closed.
    """
    poll = select.poll()
    for output in outputs:
        os.set_blocking(output, False)
        poll.register(output, select.POLLIN)
    if starter is not None:
        poll.register(starter, getattr(select, "POLLRDHUP", select.POLLHUP))
    open_outputs, ending = dict(outputs), None
    next_look = time.monotonic() + WATCH_S
    with contextlib.ExitStack() as closing:
        if hasattr(os, "pidfd_open"):  # otherwise the child's end is noticed at the next check
            handle = os.pidfd_open(child)
            closing.callback(os.close, handle)
            poll.register(handle, select.POLLIN)
        while ending is None:
            wait = min(next_look, end) - time.monotonic()
            ready = [number for number, _ in poll.poll(max(0.0, 1000 * wait))]
            if starter in ready:
                break
            for output in open_outputs.keys() & ready:
                ending = ending or _read(output, open_outputs)
                if output not in open_outputs:
                    poll.unregister(output)
            ending = ending or _exit_reason(child, sandbox)
            if time.monotonic() >= end:
                ending = ending or PASSED_DEADLINE
            if time.monotonic() >= next_look:
                ending = ending or excess(sandbox, folder)
                next_look = time.monotonic() + WATCH_S

    orphans = [] if IS_LINUX else descendants(os.getpid())  # which nobody would adopt
    _kill(os.killpg, child)  # immediately, so that no fork escapes between two kills
    for pid in orphans:
        _kill(os.kill, pid)
    kill_descendants()
    problem = None
    for output in list(open_outputs):
        while output in open_outputs:
            problem = _read(output, open_outputs) or problem
    return ending and (problem or ending)


def _read(output: int, outputs: dict[int, Callable[[bytes], str | None]]) -> str | None:
    """Forward new output; remove an output that is closed or empty."""
    try:
        chunk = os.read(output, 65536)
    except BlockingIOError:  # a killed process still exists
        chunk = b""
    if not chunk:
        del outputs[output]
        return None
    return outputs[output](chunk)


def _exit_reason(child: int, sandbox: Sandbox) -> str | None:
    """Return how the child ended, or None while it runs; also reap other processes."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return None
        if pid == child:
            return describe_exit(status, sandbox)


def describe_exit(status: int, sandbox: Sandbox) -> str:
    """Describe a status of `waitpid`."""
    if os.WIFSTOPPED(status):
        return f"was stopped by {signal.Signals(os.WSTOPSIG(status)).name}"
    if not os.WIFSIGNALED(status):
        return f"ended with exit code {os.WEXITSTATUS(status)}"

    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return OUT_OF_TIME.format(sandbox.cpu_s)
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    hint = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"


def excess(sandbox: Sandbox, folder: str) -> str | None:
    """Name a limit that this process's descendants or the files in their folder exceed, or None."""
    pids = descendants(os.getpid()) if IS_LINUX else []  # `ps` would take too long
    if len(pids) > sandbox.max_processes:
        return f"had {len(pids)} processes (max_processes={sandbox.max_processes})"

    gigabytes = sum(map(_own_memory, pids)) / 2**30
    if gigabytes > sandbox.memory_gib:
        # Forks share most of their memory. The proportional share takes longer to read.
        gigabytes = sum(map(_memory_by_share, pids)) / 2**30
    gigabytes += _memory_of_descriptors(pids) / 2**30
    if gigabytes > sandbox.memory_gib:
        return f"used {gigabytes:.1f} GiB of memory (memory_gib={sandbox.memory_gib:g})"

    gigabytes = _bytes_on_disk(folder) / 2**30
    if gigabytes > sandbox.file_gib:
        return f"wrote {gigabytes:.3g} GiB into its working folder (file_gib={sandbox.file_gib:g})"
    return None


def _own_memory(pid: int) -> int:
    """Return the resident bytes of a process, shared ones too, but no files; 0 if it is gone."""
    return _bytes_in(f"/proc/{pid}/status", b"RssAnon:", b"RssShmem:")


def _memory_by_share(pid: int) -> int:
    """Return the memory like `_own_memory`, but divide shared memory among its processes."""
    path = f"/proc/{pid}/smaps_rollup"
    return _bytes_in(path, b"Pss_Anon:", b"Pss_Shmem:") or _own_memory(pid)


def _bytes_in(path: str, *names: bytes) -> int:
    """Return the sum of these entries of a file in /proc; missing ones count 0."""
    words = proc_fields(path)[::-1]  # of `status`, the first line has a name, which may be any text
    return sum(1024 * int(words[words.index(name) - 1]) for name in names if name in words)


def _memory_of_descriptors(pids: Iterable[int]) -> int:
    """Return the bytes of the memory files (memfd) and pipes that these processes have open."""
    sizes: dict[str, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):  # the process, or the descriptor, has just gone
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(entry.path)
                    if target.startswith("/memfd:"):
                        entry_stat = os.stat(entry.path)
                        sizes[f"{target} {entry_stat.st_ino}"] = 512 * entry_stat.st_blocks
                    elif target.startswith("pipe:") and target not in sizes:
                        sizes[target] = _pipe_size(entry.path)
    return sum(sizes.values())


def _pipe_size(path: str) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        return fcntl(descriptor, _F_GETPIPE_SZ)
    finally:
        os.close(descriptor)


def _bytes_on_disk(folder: str) -> int:
    """Return the bytes of the files below a folder, at least a block per file."""
    blocks, ahead = 0, [folder]
    while ahead:
        with contextlib.suppress(OSError), os.scandir(ahead.pop()) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):  # it has just been removed
                    blocks += max(_BLOCKS, entry.stat(follow_symlinks=False).st_blocks)
                    if entry.is_dir(follow_symlinks=False):
                        ahead.append(entry.path)
    return 512 * blocks


def kill_descendants() -> None:
    """Kill and wait for all processes that this process has started, including adopted orphans."""
    end = time.monotonic() + KILL_S
    while time.monotonic() < end:
        for pid in descendants(os.getpid()):
            _kill(os.killpg, pid)  # if it leads a group
            _kill(os.kill, pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill(kill: Callable[[int, int], None], pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(pid, signal.SIGKILL)


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies; do nothing on other systems."""
    if IS_LINUX:
        LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of descendants whose parents die; do nothing on other systems."""
    if IS_LINUX:
        LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
