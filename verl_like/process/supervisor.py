"""Watching a process that runs code of strangers: nothing of it is left when it ends.

    supervise(control, data, sandbox, program)      # does not return

forks: the child runs `program(data)` in a folder of its own, this process watches it. It ends when
the child ends or stops, when a limit is passed, or when the other end of `control` is closed; then
every process that the child has started is killed, whatever session it went to, and the folder is
removed. The other end is told, as JSON, first the child's number and folder, and in the end how it
ended. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection

from verl_like.errors import ConfigError
from verl_like.process.deep_folder import remove_folder
from verl_like.process.machine import descendants, words_of
from verl_like.process.sandbox import Sandbox, isolate_network

WATCH_S = 0.2
"""Time between two looks at how many processes there are, their memory and their files."""
MOST_OUTPUT = 2**20
"""Bytes that a process may print; what comes later is dropped."""
KILL_S = 5.0
"""Time that killed processes get to end."""
OUT_OF_TIME = "used up its processor time (cpu_s={0:g})"

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
_BLOCKS = 8
"""What a file counts for at least, in the system's units of 512 bytes."""


def supervise(
    control: Connection, data: socket.socket, sandbox: Sandbox, program: Callable[..., None]
) -> None:
    """Run `program(data)` in a child of this process, which must have one thread; never returns."""
    folder = tempfile.mkdtemp(prefix="verl_like_sandbox_")
    ending: str | None = None
    try:
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        if not sandbox.network:
            isolate_network()
        ending = _Supervised(control, data, sandbox, program, folder).watch()
    except ConfigError as err:
        ending = f"was refused: {err}"
    finally:
        kill_descendants()
        remove_folder(folder)
        if ending is not None:
            _tell(control, ending)
        os._exit(0)


def _tell(control: Connection, what: object) -> None:
    try:
        control.send_bytes(json.dumps(what).encode())
    except OSError:  # the other end is gone
        pass


class _Supervised:
    """The child, its output, and what wakes its supervisor."""

    def __init__(
        self,
        control: Connection,
        data: socket.socket,
        sandbox: Sandbox,
        program: Callable[..., None],
        folder: str,
    ) -> None:
        self._control, self._sandbox, self._folder = control, sandbox, folder
        self._wakes, wakened = os.pipe()
        os.set_blocking(wakened, False)
        os.set_blocking(self._wakes, False)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

        pipes = {1: os.pipe(), 2: os.pipe()}
        supervisor = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            control.close()
            for number in (self._wakes, wakened, *(ours for ours, _ in pipes.values())):
                os.close(number)
            outputs = {number: theirs for number, (_, theirs) in pipes.items()}
            _run_child(supervisor, outputs, folder, sandbox, lambda: program(data))
        data.close()
        _tell(control, [self._child, folder])
        self._outputs = {ours: to for to, (ours, theirs) in pipes.items()}
        for ours, theirs in pipes.values():
            os.close(theirs)
            os.set_blocking(ours, False)
        self._printed = 0

    def watch(self) -> str | None:
        """How the child ended; None if the other end of `control` is closed."""
        next_look = time.monotonic() + WATCH_S
        while True:
            control = self._control.fileno()
            sources = [control, self._wakes, *self._outputs]
            wait = max(0.0, next_look - time.monotonic())
            ready = select.select(sources, [], [], wait)[0]
            if control in ready:
                self._kill()
                return None

            for output in [source for source in ready if source in self._outputs]:
                self._forward(output)
            if self._wakes in ready:
                os.read(self._wakes, 1024)
            ending = self._ending()
            if time.monotonic() >= next_look:
                ending = ending or excess(self._sandbox, self._folder)
                next_look = time.monotonic() + WATCH_S
            if ending is not None:
                self._kill()
                return ending

    def _ending(self) -> str | None:
        """How the child ended, if it has; other processes that ended are waited for, too."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            if pid == 0:
                return None
            if pid == self._child:
                return how_it_ended(status, self._sandbox)

    def _kill(self) -> None:
        """Kill all of them, and pass on what they had printed."""
        _kill(os.killpg, self._child)  # at once: no fork escapes between two kills
        kill_descendants()
        for output in list(self._outputs):
            while output in self._outputs:
                self._forward(output)

    def _forward(self, output: int) -> None:
        try:
            chunk = os.read(output, 65536)
        except BlockingIOError:  # a process that was killed is not yet gone
            chunk = b""
        if not chunk:
            del self._outputs[output]
            return

        room = MOST_OUTPUT - self._printed
        if room <= 0:
            return
        self._printed += len(chunk)
        if self._printed >= MOST_OUTPUT:
            chunk = chunk[:room] + b"\n[further output of this process is dropped]\n"
        os.write(self._outputs[output], chunk)


def _run_child(
    supervisor: int,
    outputs: dict[int, int],
    folder: str,
    sandbox: Sandbox,
    program: Callable[[], None],
) -> None:
    """What runs in the child; does not return."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before it could be watched
            os._exit(code)
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, pipe in outputs.items():
            os.dup2(pipe, number)
            os.close(pipe)
        os.chdir(folder)
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        sandbox.confine()
        program()
        code = 0
    except BaseException:  # noqa: BLE001 - this is the edge of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def how_it_ended(status: int, sandbox: Sandbox) -> str:
    """A status of `waitpid` in words."""
    if os.WIFSTOPPED(status):
        return f"was stopped by {signal.Signals(os.WSTOPSIG(status)).name}"
    if not os.WIFSIGNALED(status):
        return f"ended with exit code {os.WEXITSTATUS(status)}"

    number = os.WTERMSIG(status)
    if number == signal.SIGXCPU:
        return OUT_OF_TIME.format(sandbox.cpu_s)
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    more = ", as the system does when memory runs out" if number == signal.SIGKILL else ""
    return f"was killed by {name}{more}"


def excess(sandbox: Sandbox, folder: str) -> str | None:
    """Which limit the descendants of this process pass together, or the files in their folder."""
    pids = descendants(os.getpid())
    if len(pids) > sandbox.processes:
        return f"had {len(pids)} processes (processes={sandbox.processes})"

    gigabytes = sum(map(_own_memory, pids)) / 2**30
    if gigabytes > sandbox.memory_gb:
        return f"took {gigabytes:.1f} GiB of memory (memory_gb={sandbox.memory_gb:g})"

    gigabytes = _bytes_on_disk(folder) / 2**30
    if gigabytes > sandbox.file_gb:
        return f"had {gigabytes:.3g} GiB in its working folder (file_gb={sandbox.file_gb:g})"
    return None


def _own_memory(pid: int) -> int:
    """Bytes that a process holds, shared memory included, files aside; 0 when it is gone."""
    words = words_of(f"/proc/{pid}/status")[::-1]  # the first line, its name, may be any text
    found = [words.index(word) for word in (b"RssAnon:", b"RssShmem:") if word in words]
    return sum(1024 * int(words[place - 1]) for place in found)


def _bytes_on_disk(folder: str) -> int:
    """What the files below a folder take, a block each at least, so that their number counts."""
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
    """Kill and wait for all that this process has started, a subreaper's orphans included."""
    end = time.monotonic() + KILL_S
    while time.monotonic() < end:
        for pid in descendants(os.getpid()):
            _kill(os.killpg, pid)  # if it leads one
            _kill(os.kill, pid)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill(kill: Callable[[int, int], None], pid: int) -> None:
    try:
        kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def prctl(option: int, value: int) -> None:
    """Linux's prctl; elsewhere there is none, and groups alone are killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
