"""A server that has torch and transformers loaded, and forks processes instead of starting them.

A new interpreter spends seconds on importing them; a fork has them at once. `fork_client.py`
requests forks instead of workers of a Ray cluster (`tests/forked_ray.py`), of the Python that
scripts run (`forked_python`) and of the processes of pytest-xdist (`tests/conftest.py`). Program,
arguments, environment, folder, input, output, exit status and signals are as in a started process.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.util
import multiprocessing
import os
import runpy
import shlex
import signal
import socket
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import pytest

from tests import fork_client
from tests.fork_client import ADDRESS, AS_PYTHON, AS_TESTS, Request, packed, receive, send
from tests.forked import fork_children
from tests.forked_ray import ask_for_forks


@contextmanager
def fork_server() -> Iterator[None]:
    """Context in which this process and its children have a fork server.

    It is the existing server, or a new one, which ends with this process.
    """
    if ADDRESS in os.environ:
        yield
        return
    context = multiprocessing.get_context("forkserver")
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        address = f"{folder}/forks"
        theirs, ours = context.Pipe(duplex=False)
        with socket.socket(socket.AF_UNIX) as listening, theirs:
            listening.bind(address)
            listening.listen(64)
            server = context.Process(target=serve, args=(listening, theirs), daemon=True)
            server.start()
        patch.setenv(ADDRESS, address)
        with ours:
            yield
        server.join()


def write_python(folder: Path) -> Path:
    """Write an executable for scripts that accepts `python`'s arguments."""
    program = folder / "python"
    program.write_text(f'#!/bin/sh\nexec {_asking(AS_PYTHON)} "$@"\n')
    program.chmod(0o755)
    return program


def python_of_tests() -> str:
    """Return the same as a command, for processes that run tests."""
    return _asking(AS_TESTS)


def _asking(kind: str) -> str:
    return shlex.join([sys.executable, "-I", "-S", fork_client.__file__, kind])


def serve(listening: socket.socket, starter: Connection) -> None:
    """Fork for every request, until the other end of `starter` is closed."""
    asking = asking_until_their_end()
    ray_servers: dict[frozenset[tuple[str, str]], socket.socket] = {}
    while starter not in wait([listening, starter]):
        connection, _ = listening.accept()
        try:
            descriptors, request = receive(connection, 3)
        except EOFError:  # whoever asked was killed
            connection.close()
            continue
        arguments, environment, _ = request
        if arguments[0] in (AS_PYTHON, AS_TESTS):
            ends = [listening, starter, *ray_servers.values()]
            fork(request, descriptors, connection, asking, ends)
            continue

        settings = ray_settings(environment)
        if settings not in ray_servers:
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                others = (listening, starter, connection, ours)
                for end in (*others, *asking.values(), *ray_servers.values()):
                    end.close()
                os.environ.update(settings)
                serve_ray(theirs)
            theirs.close()
            ray_servers[settings] = ours
        with connection:
            send(ray_servers[settings], request, [*descriptors, connection.fileno()])
        close(descriptors)


def serve_ray(requests: socket.socket) -> None:
    """Serve forks that have imported Ray, which reads its settings when it is loaded."""
    importlib.import_module("ray")
    asking = asking_until_their_end()
    with suppress(EOFError):
        while True:
            descriptors, request = receive(requests, 4)
            connection = socket.socket(fileno=descriptors.pop())
            fork(request, descriptors, connection, asking, [requests])
    os._exit(0)


def ray_settings(environment: dict[str, str]) -> frozenset[tuple[str, str]]:
    """Return Ray's variables, which are the same for all workers of a daemon."""
    return frozenset((k, v) for k, v in environment.items() if k.startswith("RAY_"))


def asking_until_their_end() -> dict[int, socket.socket]:
    """Record who requested which fork until it ends: then reap the fork, and report its status."""
    asking: dict[int, socket.socket] = {}
    signal.signal(signal.SIGCHLD, lambda *_: reap(asking))
    return asking


def fork(
    request: Request,
    descriptors: list[int],
    connection: socket.socket,
    asking: dict[int, socket.socket],
    ours: list[socket.socket | Connection],
) -> None:
    """Start a process for the request of `connection`; it closes the descriptors in `ours`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    process = os.fork()
    if process == 0:
        for end in (connection, *asking.values(), *ours):
            end.close()
        run(descriptors, *request)
    asking[process] = connection
    with suppress(OSError):
        connection.sendall(packed(process))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    close(descriptors)


def close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def reap(asking: dict[int, socket.socket]) -> None:
    """Reap ended forks at once, and tell the processes that requested them."""
    with suppress(ChildProcessError):
        while True:
            process, status = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if process in asking:
                with asking.pop(process) as connection, suppress(OSError):
                    connection.sendall(packed(code if code >= 0 else 128 - code))


def run(
    descriptors: list[int], arguments: list[str], environment: dict[str, str], folder: str
) -> NoReturn:
    """Do what `python ARGUMENTS`, or Ray's program with them, does; then end the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    modules = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = filter(None, modules)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - until the end of the process

    code = 0
    try:
        if arguments[0] == AS_PYTHON:
            ask_for_forks(pytest.MonkeyPatch())
        if arguments[0] in (AS_PYTHON, AS_TESTS):
            run_python(*arguments[1:])
        else:
            run_ray_worker(arguments)
    except SystemExit as end:
        code = exit_status(end)
    except BaseException:  # noqa: BLE001 - the edge of the process
        code = 1
        traceback.print_exc()
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def exit_status(end: SystemExit) -> int:
    """Return Python's exit status, after printing a text if there is one."""
    if isinstance(end.code, str):
        print(end.code, file=sys.stderr)
    return end.code if isinstance(end.code, int) else int(end.code is not None)


def run_ray_worker(arguments: list[str]) -> None:
    ray = importlib.util.find_spec("ray")
    assert ray is not None, "a worker of Ray's is started where Ray is"
    assert ray.origin is not None, "Ray is a package on disk"
    program = Path(ray.origin).with_name("_private") / "workers" / "default_worker.py"
    sys.path.insert(0, str(program.parent))
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")


def run_python(*arguments: str) -> None:
    """Run `-c CODE`, `-m MODULE` or a file with its arguments; `-P` or `-u` may come first."""
    option, *rest = arguments
    adds_folder = option != "-P"
    if option == "-u":
        for output in (sys.stdout, sys.stderr):
            output.reconfigure(write_through=True)
    kind, *rest = rest if option in ("-P", "-u") else arguments
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    fork_children()
    if kind in ("-c", "-m"):
        program, *rest = rest
        if adds_folder:
            sys.path.insert(0, os.getcwd() if kind == "-m" else "")
        sys.argv = [kind, *rest]
        if kind == "-c":
            exec(compile(program, "<string>", "exec"), main.__dict__)
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        if adds_folder:
            sys.path.insert(0, str(Path(kind).resolve().parent))
        sys.argv = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")
