"""Fork programs that do not need torch, such as the process of a reward, instead of starting them.

A new interpreter spends a tenth of a second on the standard library, which is longer than a reward
function of the tests takes for all samples, and two seconds on the client library of an agent.
`tests/forked.py` calls `start_fork`; the servers run this file.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from tests.fork_client import Request, packed, read_number, receive, send

SMALL = (
    *("workers.rewards.process", "workers.rewards.functions", "workers.rewards.program"),
    "trainer.tools.migrate.recorder",
)
ENVIRONMENTS = ("workers.agents.process", "numpy", "openai")
PROGRAMS = {
    "workers.rewards.process": SMALL,
    "workers.rewards.program": SMALL,
    "trainer.tools.migrate.recorder": SMALL,
    "workers.agents.process": ENVIRONMENTS,
}
"""Program that may be forked here -> the modules that its server has loaded."""
DESCRIPTORS = 4


class BareProcess:
    """The part of `subprocess.Popen` that the starters of children use."""

    def __init__(self, answers: socket.socket) -> None:
        self._answers = answers
        self.returncode: int | None = None
        try:
            self.pid: int = read_number(answers)
        except BaseException:
            answers.close()
            raise

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._answers.settimeout(timeout)
            try:
                self.returncode = read_number(self._answers)
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired("a forked process", timeout or 0.0) from None
            except EOFError:  # the tests are over: it has ended with the server
                self.returncode = -signal.SIGKILL
            self._answers.close()
        return self.returncode

    def kill(self) -> None:
        if not servers:
            return  # the tests are over: it has ended with its server's caller
        try:
            self.wait(0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and is not yet reported
                os.kill(self.pid, signal.SIGKILL)


class _Server:
    """The forking process, as the tests see it; it ends when this process does."""

    def __init__(self, preloaded: Sequence[str]) -> None:
        self._asking = threading.Lock()
        self._requests, theirs = socket.socketpair()
        root = str(Path(__file__).resolve().parents[1])
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tests.bare_forks", str(theirs.fileno()), *preloaded],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": root},
                process_group=0,
            )

    def start(self, request: Request, descriptors: list[int]) -> BareProcess:
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._asking:
                send(self._requests, request, [theirs.fileno(), *descriptors])
        except BaseException:
            ours.close()
            raise
        return BareProcess(ours)

    def end(self) -> int:
        """End the process, and return its exit status."""
        self._requests.close()
        return self._process.wait()


servers: dict[Sequence[str], _Server] = {}
"""Preloaded modules -> their server."""
_replacing = threading.Lock()


def server(program: str) -> _Server:
    """Return the server that forks this program; start it if there is none."""
    preloaded = PROGRAMS[program]
    with _replacing:
        if preloaded not in servers:
            servers[preloaded] = _Server(preloaded)
        return servers[preloaded]


def end_servers() -> None:
    while servers:
        servers.popitem()[1].end()


def start_fork(
    program: str, pipe: Connection, arguments: Sequence[str], environment: Mapping[str, str]
) -> BareProcess:
    """Start a process of `verl_like.process.child`: same program, pipe, environment and output."""
    request = [program, *arguments], dict(environment), os.getcwd()
    descriptors, first = [pipe.fileno(), 1, 2], server(program)
    try:
        return first.start(request, descriptors)
    except (BrokenPipeError, EOFError):  # it has ended, perhaps killed by a test
        remove_server(program, first)
    return server(program).start(request, descriptors)


def remove_server(program: str, lost: _Server) -> None:
    """Let the next request start another server, unless one has been started already."""
    with _replacing:
        if servers.get(PROGRAMS[program]) is lost:
            status = servers.pop(PROGRAMS[program]).end()
            print(f"a server of forks ended with {status}", file=sys.__stderr__, flush=True)


def serve(requests: socket.socket) -> tuple[list[int], Request]:
    """Fork for every request, and report how each fork ends.

    The server itself ends when nobody is left to ask.
    """
    running: dict[int, socket.socket] = {}
    wakes, wakened = os.pipe()
    watched: list[socket.socket | int] = [requests, wakes]
    os.set_blocking(wakened, False)
    signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select(watched, [], [])[0]
        if wakes in ready:
            os.read(wakes, 1024)
            report_ended(running)
        if requests not in ready:
            continue

        try:
            descriptors, request = receive(requests, DESCRIPTORS)
        except EOFError:
            os._exit(0)
        answers, *others = descriptors
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (requests.detach(), wakes, wakened, answers):
                os.close(number)
            for other in running.values():
                other.close()
            return others, request
        running[pid] = socket.socket(fileno=answers)
        with contextlib.suppress(OSError):  # a signal has interrupted who asked
            running[pid].sendall(packed(pid))
        for descriptor in others:
            os.close(descriptor)


def report_ended(running: dict[int, socket.socket]) -> None:
    """Send the exit code of an ended fork to the process that requested it."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as answers:
            with contextlib.suppress(OSError):  # nobody waits for it
                answers.sendall(packed(os.waitstatus_to_exitcode(status)))


def run_program(descriptors: Sequence[int], request: Request) -> None:
    """Do what `python -m verl_like.process.child PROGRAM` does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    pipe, *outputs = descriptors
    for number, output in enumerate(outputs, start=1):
        os.dup2(output, number)
        os.close(output)
    (program, *arguments), environment, folder = request
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    connection = Connection(pipe)
    sys.path[:] = connection.recv()
    importlib.import_module(program).main(connection, *arguments)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        importlib.import_module(name)
    run_program(*serve(socket.socket(fileno=int(sys.argv[1]))))
