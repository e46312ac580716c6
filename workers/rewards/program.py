"""The process that runs programs written by a model, one test at a time.

    python -m verl_like.process.child workers.rewards.program FD on|off

`workers.rewards.code` starts it and sends requests through the socket FD. Every test runs in a fork
of this process with its own limits. As far as the machine supports this, a test cannot start
processes, signal other processes, write outside its folder, or (with `off`) use the network. Except
for trusted asserts (`kind="assert"`), the expected values never reach a process that runs programs,
so a program cannot look for them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.kernel_limits import (
    PROCESSES,
    SIGNALS,
    can_restrict_writes,
    isolate_network,
    restrict_writes,
)
from verl_like.process.pool import UserEnd
from verl_like.process.sandbox import Sandbox, remove_folder
from verl_like.process.supervisor import (
    DATA,
    ENDED_WELL,
    adopt_orphans,
    die_with_parent,
    fork_confined,
    watch,
)

MAX_OUTPUT = 2**19
"""Maximum bytes that a program may print in one test."""
FILE_GIB = 2**-6
"""Maximum size of a file that a program may write, in GiB: 16 MiB."""


@dataclass(frozen=True)
class Program:
    """A program written by a model, and its tests."""

    code: str
    inputs: list[Any]
    """One entry per test, of the type that `kind` names."""
    kind: str = "stdin"
    """stdin (standard input), function (its arguments), value (an expression), or assert."""
    function: str = ""
    """Name of the function, or of the method if the program has a class `Solution`."""
    time_s: float = 2.0
    """Time limit of each test."""
    total_s: float = 8.0
    """Time limit of all tests together."""
    memory_gib: float = 1.0
    """GiB of memory of each test."""


def main(pipe: Connection, network: str) -> None:
    """Run programs until the other end closes; `network` is "on" or "off"."""
    parent = UserEnd(os.dup(pipe.fileno()))
    pipe.close()
    die_with_parent()
    adopt_orphans()
    if network == "off":
        try:
            isolate_network()
        except ConfigError as err:
            _warn(f"can reach the network: {err}")
    if not can_restrict_writes():
        _warn("can write outside their folder, because this machine has no Landlock")
    while True:
        try:
            messages = parent.receive()
        except EOFError:
            return
        began = time.monotonic()
        for number, (program, test) in messages:
            parent.send(number, run_test(program, test, began + program.total_s))


def _warn(danger: str) -> None:
    print(f"warning: the model's programs {danger}", file=sys.stderr, flush=True)


def run_test(program: Program, number: int, end: float) -> tuple[str, str | None]:
    """Run one test; return its output (printed text, or a value as text), and a problem or None."""
    sandbox = Sandbox(memory_gib=program.memory_gib, cpu_s=program.time_s, file_gib=FILE_GIB)
    token = secrets.token_hex()
    output = bytearray()

    def collect(chunk: bytes) -> str | None:
        output.extend(chunk)
        return f"printed more than {MAX_OUTPUT} bytes" if len(output) > MAX_OUTPUT else None

    def act() -> None:
        os.environ.clear()
        os.environ.update({"HOME": folder, "TMPDIR": folder, "PATH": os.defpath})
        sandbox.allow_cpu()
        with contextlib.suppress(ConfigError):  # `main` has reported it
            restrict_writes(folder, os.devnull, extra=(*PROCESSES, *SIGNALS))
        _act(program, program.inputs[number], token)

    folder = tempfile.mkdtemp(prefix="program_")
    ours, theirs = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        deadline = min(end, time.monotonic() + program.time_s)
        child = fork_confined(folder, sandbox, {0: null, 2: null, DATA: theirs}, act)
        os.close(theirs)
        problem = watch(child, folder, sandbox, {ours: collect}, deadline)
    finally:
        os.close(ours)
        os.close(null)
        remove_folder(folder)
    if problem != ENDED_WELL:
        return "", problem
    text = output.decode("utf-8", "replace")
    if program.kind == "assert" and text != token:
        return text, "ended before the assertion held"
    return text, None


def _act(program: Program, test_input: Any, token: str) -> None:
    """Run the program on one test."""
    stdin = program.kind == "stdin"
    with tempfile.TemporaryFile() as file:
        file.write(test_input.encode() if stdin else b"")
        file.seek(0)
        os.dup2(file.fileno(), 0)
    os.dup2(DATA if stdin else 2, 1)
    sys.stdin = os.fdopen(0, encoding="utf-8", errors="replace")
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", errors="backslashreplace")
    sys.argv = ["program.py"]
    if stdin:
        os.close(DATA)

    names: dict[str, Any] = {"__name__": "__main__" if stdin else "program"}
    exec(compile(program.code, "program.py", "exec"), names)
    if program.kind == "function":
        owner = names.get("Solution")
        function = names[program.function] if owner is None else getattr(owner(), program.function)
        os.write(DATA, json.dumps(function(*test_input)).encode())
    elif program.kind == "value":
        value = eval(compile(test_input, "test.py", "eval"), names)
        for method in ("tolist", "item"):  # arrays and numbers of numpy and torch
            value = getattr(value, method)() if hasattr(value, method) else value
        os.write(DATA, repr(value).encode())
    elif program.kind == "assert":
        exec(compile(test_input, "test.py", "exec"), names)
        os.write(DATA, token.encode())
