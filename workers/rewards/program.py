"""The program of a process that runs programs of a model, one test at a time.

    python -m verl_like.process.child workers.rewards.program FD on|off

`workers.rewards.code` starts it and asks it through the socket FD. Every test is a fork of this
process with limits of its own, without the right to start processes and, where the machine allows
it, without the network. What a test expects never comes here: a program cannot look for it.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.deep_folder import remove_folder
from verl_like.process.sandbox import Sandbox, forbid_processes, isolate_network
from verl_like.process.supervisor import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    WATCH_S,
    excess,
    how_it_ended,
    kill_descendants,
    prctl,
)
from workers.rewards.channel import FunctionEnd

MOST_OUTPUT = 2**19
"""Bytes that a program may print."""
FILE_GB = 2**-6
"""Size of a file that a program may write."""
CLOSED_S = 0.001
"""Time between two looks at whether a program has ended that prints no more."""
_RESULT = 3
"""Descriptor that a test's result is written to."""


@dataclass(frozen=True)
class Program:
    """Code of a model, and what it is run on."""

    code: str
    inputs: list[Any]
    """Of each test: text for standard input, arguments of the function, or an assertion."""
    kind: str = "stdin"
    """stdin, function or assert."""
    function: str = ""
    """Name of the function, or of a method of `Solution`."""
    time_s: float = 2.0
    """Of each test."""
    total_s: float = 8.0
    """Of all tests."""
    memory_gb: float = 1.0


def main(pipe: Connection, network: str) -> None:
    """Run programs until the other end closes; `network` is "on" or "off"."""
    parent = FunctionEnd(socket.socket(fileno=os.dup(pipe.fileno())))
    pipe.close()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if network == "off":
        try:
            isolate_network()
        except ConfigError as err:
            print(f"programs of the model reach the network: {err}", file=sys.stderr, flush=True)
    while True:
        try:
            program = parent.receive()
        except EOFError:
            return
        end = time.monotonic() + program.total_s
        for number in range(len(program.inputs)):
            parent.send([number, *run_test(program, number, end)])


def run_test(program: Program, number: int, end: float) -> tuple[str, str | None]:
    """What one test has printed or returned, and what went wrong."""
    folder = tempfile.mkdtemp(prefix="program_")
    ours, theirs = os.pipe()
    sandbox = Sandbox(memory_gb=program.memory_gb, cpu_s=program.time_s, file_gb=FILE_GB)
    token = secrets.token_hex()
    pid = os.fork()
    if pid == 0:
        _run_child(theirs, folder, sandbox, lambda: _act(program, program.inputs[number], token))

    os.close(theirs)
    try:
        deadline = min(end, time.monotonic() + program.time_s)
        output, problem = _read(ours, pid, deadline, lambda: excess(sandbox, folder))
        if problem is not None:
            os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
        if problem is None and status != 0:
            problem = how_it_ended(status, sandbox)
        if problem is None and program.kind == "assert" and output != token:
            problem = "ended before the assertion held"
        return output, problem
    finally:
        os.close(ours)
        kill_descendants()
        remove_folder(folder)


def _read(
    pipe: int, pid: int, deadline: float, excess: Callable[[], str | None]
) -> tuple[str, str | None]:
    """All that comes from a process before it ends, and what is wrong with it."""
    output, is_open = b"", True
    next_look = time.monotonic() + WATCH_S
    while True:
        now = time.monotonic()
        if now >= deadline:
            return "", "passed its deadline"
        if now >= next_look:
            if problem := excess():
                return "", problem
            next_look = time.monotonic() + WATCH_S
        if not is_open:
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
                return output.decode("utf-8", "replace"), None
            time.sleep(CLOSED_S)
        elif select.select([pipe], [], [], max(0.0, min(deadline, next_look) - now))[0]:
            chunk = os.read(pipe, 65536)
            is_open = bool(chunk)
            output += chunk
            if len(output) > MOST_OUTPUT:
                return "", f"printed more than {MOST_OUTPUT} bytes"


def _run_child(result: int, folder: str, sandbox: Sandbox, act: Callable[[], None]) -> None:
    """What runs in the fork; does not return."""
    code = 1
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        os.dup2(result, _RESULT)
        os.dup2(os.open(os.devnull, os.O_RDWR), 2)
        os.closerange(_RESULT + 1, os.sysconf("SC_OPEN_MAX"))
        os.chdir(folder)
        os.environ.clear()
        os.environ.update({"HOME": folder, "TMPDIR": folder, "PATH": os.defpath})
        sandbox.confine()
        sandbox.allow_cpu()
        forbid_processes()
        act()
        sys.stdout.flush()
        code = 0
    except SystemExit as err:
        sys.stdout.flush()
        code = 0 if err.code in (None, 0) else 1
    finally:
        os._exit(code)


def _act(program: Program, given: Any, token: str) -> None:
    """Run the program on one test."""
    stdin = program.kind == "stdin"
    with tempfile.TemporaryFile() as file:
        file.write(given.encode() if stdin else b"")
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(_RESULT if stdin else 2, 1)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace")
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace")
    sys.argv = ["program.py"]
    if stdin:
        os.close(_RESULT)

    names: dict[str, Any] = {"__name__": "__main__" if stdin else "program"}
    exec(compile(program.code, "program.py", "exec"), names)
    if program.kind == "function":
        owner = names.get("Solution")
        function = names[program.function] if owner is None else getattr(owner(), program.function)
        os.write(_RESULT, json.dumps(function(*given)).encode())
    elif program.kind == "assert":
        exec(compile(given, "test.py", "exec"), names)
        os.write(_RESULT, token.encode())
