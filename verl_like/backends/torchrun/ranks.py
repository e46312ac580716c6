"""Processes of torchrun as the ranks of a pool, on one machine.

    if not is_driver():             # torchrun runs one program in every process
        serve(limit_s)              # ranks 1, 2, ...: answer the driver's calls until it ends
    ranks = ServingRanks(limit_s)   # rank 0, the driver; its own rank is a child process of it
    group = LocalWorkerGroup(..., start_rank=ranks.start)

The others come to a socket in a folder that only this user can open: what travels is pickled, and
no stranger can send it. Then they are what child processes of the local backend are: a signal that
torchrun hands on is the driver's alone to obey. Several machines are for Ray.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from verl_like.backends.local import child
from verl_like.backends.local.children import ChildProcess, start_child_rank
from verl_like.errors import ConfigError, PlacementError, WorkerError
from verl_like.process.environment import is_under_torchrun
from verl_like.process.facts import ProcessFacts
from verl_like.process.private_folder import private_folder

RETRY_S = 0.05


def num_processes() -> int:
    """How many torchrun started, all of them on this machine."""
    if not is_under_torchrun():
        raise ConfigError(
            "trainer.backend=torchrun, but torchrun did not start this process. Start it by: "
            "torchrun --standalone --nproc-per-node N --no-python verl-like sft key=value ..."
        )
    total, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if total != here:
        raise PlacementError(
            f"trainer.backend=torchrun runs on one machine, and torchrun started {here} of "
            f"{total} processes on this one; trainer.backend=ray runs on several."
        )
    return total


def is_driver() -> bool:
    """Whether this process is rank 0, which runs the driver."""
    num_processes()
    return os.environ["RANK"] == "0"


class ServingRanks:
    """The other processes, at the driver; `start` finds them as their group asks for them."""

    def __init__(self, limit_s: float) -> None:
        """Each has to connect within the limit once it is asked for."""
        self._limit_s = limit_s
        self._arrived: dict[int, _ServingProcess] = {}
        self._socket, self._path = socket.socket(socket.AF_UNIX), _socket_path()

    def start(self, facts: ProcessFacts, env: Mapping[str, str]) -> tuple[ChildProcess, Connection]:
        """The process of one rank, and the pipe to it."""
        if facts.rank == 0:
            self._path.unlink(missing_ok=True)  # a run that was killed may have left it
            self._socket.bind(str(self._path))
            self._socket.listen(facts.world_size)
            return start_child_rank(facts, env)

        deadline = time.monotonic() + self._limit_s
        while facts.rank not in self._arrived:
            self._socket.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                process = _ServingProcess(self._socket.accept()[0])
            except TimeoutError as error:
                raise WorkerError(
                    f"{facts.name} rank {facts.rank}: torchrun's process of that rank did not "
                    f"come within {self._limit_s:.0f} s (watch.start_s)."
                ) from error
            self._arrived[process.rank] = process
            if len(self._arrived) == facts.world_size - 1:
                self._socket.close()
                self._path.unlink()
        process = self._arrived[facts.rank]
        return process, process.connection


class _ServingProcess:
    """A process that torchrun started and will wait for."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self.connection = Connection(os.dup(connected.fileno()))
        self.rank, self.pid = self.connection.recv()

    def kill(self) -> None:
        """Hang up: it ends then, in the middle of a call too."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> None:
        """Does nothing: torchrun waits for the process and knows its exit status."""


def serve(limit_s: float) -> None:
    """Be the rank that torchrun's variables say, until the driver ends. Ends this process."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the driver saves first, and ends this process then
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # torchrun shows all to every process
    path, deadline = _socket_path(), time.monotonic() + limit_s
    connected = socket.socket(socket.AF_UNIX)
    while True:
        try:
            connected.connect(str(path))
            break
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if time.monotonic() > deadline:
                raise WorkerError(
                    f"rank {os.environ['RANK']}: the driver did not open {path} within "
                    f"{limit_s:.0f} s (watch.call_s)."
                ) from error
            time.sleep(RETRY_S)
    connection = Connection(connected.detach())
    connection.send((int(os.environ["RANK"]), os.getpid()))
    child.main(connection)


def _socket_path() -> Path:
    """Where the processes of one start of torchrun meet: its port is no other start's."""
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return private_folder() / f"{os.environ['MASTER_PORT']}-{restarts}.socket"
