"""Ray's worker processes of the tests forked instead of started anew.

As in `tests/forked.py`: a new interpreter spends seconds on importing torch and transformers, a
fork of a process that has them starts at once. The daemon of a cluster that is started here runs
`tests/ray_worker.py` for a worker, which asks the process of `serve` for a fork. Program,
arguments, environment, folder and output are as Ray gives them.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import os
import pickle
import runpy
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests import ray_worker

IMPORTED_BY_RAY = ("google.protobuf.descriptor_pb2", "jsonschema", "msgpack", "requests")
"""Ray itself is imported in the fork: it reads its environment when it is loaded."""


@contextmanager
def forked_ray_workers() -> Iterator[None]:
    """Clusters that are started within fork their workers."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        address = f"{folder}/forks"
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen()
            server = multiprocessing.get_context("forkserver").Process(
                target=serve, args=(listening,), daemon=True
            )
            server.start()
        patch.setenv(ray_worker.ADDRESS, address)
        ask_for_forks(patch)
        yield
        server.kill()
        server.join()


def ask_for_forks(patch: pytest.MonkeyPatch) -> None:
    """Clusters that this process starts fork their workers, if a test with a server runs it."""
    from ray._private.node import Node

    start_raylet = Node.start_raylet

    def start_with_forks(node: Any, *args: Any, **options: Any) -> None:
        node._ray_params.worker_path = ray_worker.__file__
        start_raylet(node, *args, **options)

    if ray_worker.ADDRESS in os.environ:
        patch.setattr(Node, "start_raylet", start_with_forks)


def serve(listening: socket.socket) -> None:
    """A fork for every request, until the tests end."""
    for name in IMPORTED_BY_RAY:
        importlib.import_module(name)
    (ray,) = importlib.util.find_spec("ray").submodule_search_locations
    program = Path(ray, "_private", "workers", "default_worker.py")
    signal.signal(signal.SIGCHLD, reap)
    while True:
        connection, _ = listening.accept()
        with connection:
            size, descriptors, _, _ = socket.recv_fds(connection, 8, 3)
            request = b""
            while len(request) < int.from_bytes(size, "little"):
                request += connection.recv(1 << 16)
            if os.fork() == 0:
                listening.close()
                connection.close()
                return run_worker(program, descriptors, *pickle.loads(request))
            for descriptor in descriptors:
                os.close(descriptor)


def reap(*_: object) -> None:
    """Forks that have ended are gone from the list of processes at once."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def run_worker(
    program: Path,
    descriptors: list[int],
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
) -> None:
    """What `python PROGRAM ARGUMENTS` does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    modules = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [str(program.parent), *filter(None, modules)]
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")
