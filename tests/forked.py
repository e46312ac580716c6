"""Worker processes that are forked from the test run's server instead of started.

A new interpreter spends seconds on importing torch and transformers; a process of the server, which
has them loaded (`PRELOADED` in `tests/conftest.py`), starts at once. The rest is as in a child of
`verl_like.process.child`: program, pipe, environment, import path, group, output, exit status.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from tests import bare_forks
from verl_like.process import child

FORKED = ("verl_like.backends.rpc",)
"""Programs that are forked from the server that has torch."""
start_python = child._start_python


class ForkedProcess:
    """The part of `subprocess.Popen` that the starters of children use."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid = process.pid
        self.terminate, self.kill = process.terminate, process.kill

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self._process.exitcode


def start_forked(
    program: str, pipe: Connection, arguments: Sequence[str], environment: Mapping[str, str]
) -> Any:
    """Replacement of `child._start_python`."""
    if program in bare_forks.PROGRAMS:
        return bare_forks.start_fork(program, pipe, arguments, environment)
    if program not in FORKED:
        return start_python(program, pipe, arguments, environment)

    process = multiprocessing.get_context("forkserver").Process(
        target=_run,
        args=(program, pipe, arguments, dict(environment), Descriptors()),
        daemon=True,
    )
    process.start()
    return ForkedProcess(process)


def fork_children() -> None:
    """Let a forked process fork its own worker processes from the same server."""
    multiprocessing.current_process()._config["daemon"] = False  # which may have no children
    forkserver._forkserver.ensure_running = lambda: None  # it runs, but is not this one's child
    child._start_python = start_forked


class Descriptors:
    """Files of this process that become standard output and error where this is unpickled."""

    def __init__(self, output: int = 1, errors: int = 2) -> None:
        self.numbers = output, errors

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return _take_over, tuple(map(DupFd, self.numbers))


def _take_over(*descriptors: Any) -> None:
    for number, descriptor in enumerate(descriptors, start=1):
        copy = descriptor.detach()
        os.dup2(copy, number)
        os.close(copy)


def _run(
    program: str,
    pipe: Connection,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    _output: None,
) -> None:
    os.setpgid(0, 0)
    multiprocessing.current_process()._config["daemon"] = False  # vLLM starts processes there
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = pipe.recv()
    importlib.import_module(program).main(pipe, *arguments)


def run_program(
    program: Callable[[], None], *arguments: str, folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Do what `program()` does, in a forked process with these `sys.argv[1:]`, in `folder`.

    This is for programs whose imports are not tested. The function must be at module level.
    """
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        descriptors = Descriptors(output.fileno(), errors.fileno())
        process = multiprocessing.get_context("forkserver").Process(
            target=_run_program,
            args=(program, arguments, str(folder), {**os.environ, **environment}, descriptors),
        )
        process.start()
        process.join()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(list(arguments), process.exitcode or 0, *texts)


def _run_program(
    program: Callable[[], None],
    arguments: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
    _output: None,
) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [program.__module__, *arguments]
    fork_children()
    _fix_threads_of_torch()
    program()


def _fix_threads_of_torch() -> None:
    """Work around torch's thread pool, which it creates again at the first use after a fork."""
    import torch  # here, the scheduling process of pytest-xdist needs none

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Any:
    """Fork every test's worker processes, on Linux."""
    if sys.platform != "linux":
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(child, "_start_python", start_forked)
        yield
    bare_forks.end_servers()
