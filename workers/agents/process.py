"""The program that runs environments: it loads their code, then forks processes for trajectories.

`workers.agents.host` starts it in a sandbox, and tells it which processes to start and kill.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from verl_like.process.pool import UserEnd, describe_error, packed
from verl_like.process.supervisor import PR_SET_PDEATHSIG, prctl, supervise
from workers.agents.environment import Environment, Observation
from workers.agents.episode import begin
from workers.agents.load_environment import EnvironmentSpec, Loaded
from workers.rewards.failures import place_of

DESCRIBE = partial(describe_error, sandbox="environment.sandbox")
ORDER = struct.Struct("!cQ")
"""Format of an order: open or kill, and the number of the process."""
OPEN, KILL = b"o", b"k"
MOST_PASSED = 2
"""Maximum number of descriptors that come with an order."""
WARM_UPS = 16
"""Number of calls that warm a function up; Python specializes it after a few calls."""
PREFIX = b"(environment) "
"""Prefix of each line that environments print."""
MOST_OUTPUT = 2**16
"""Bytes that all environments of this program together may print; later output is dropped."""
REAP_S = 0.2
"""Interval for reaping ended processes."""


def main(control: Connection) -> None:
    """Serve the process that started this one, until it closes the socket."""
    spec, folder, _ = control.recv()
    supervise(
        control.fileno(), folder, spec.sandbox, partial(serve, spec=spec), PREFIX, MOST_OUTPUT
    )


def serve(descriptor: int, spec: EnvironmentSpec) -> None:
    """Load the code, then fork a process for each requested trajectory."""

    def load() -> tuple[dict[str, Loaded], Any]:
        loaded = spec.load_all()
        kinds = {
            name: [[tool.schema for tool in code.tools], code.columns, code.players]
            for name, code in loaded.items()
        }
        return loaded, kinds

    end = UserEnd(os.dup(descriptor))
    loaded = end.load(spec.setting, load, DESCRIBE)
    end.close()  # so that no trajectory's process has it
    for environment in loaded.values():  # do work that every trajectory's process would repeat
        _ = environment.has_step  # cached here, like tools and columns, for all forks
        if environment.is_async:
            importlib.import_module("asyncio")
    _warm_up()
    gc.collect()
    gc.freeze()  # so that garbage collection in a fork does not copy the loaded pages
    _fork_on_orders(socket.socket(fileno=descriptor), loaded, spec)


def _fork_on_orders(
    orders: socket.socket, loaded: Mapping[str, Loaded], spec: EnvironmentSpec
) -> None:
    """Start and kill the processes of trajectories, until the other end closes."""
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([orders], [], [], REAP_S)
        with suppress(ChildProcessError):
            while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
                running = {number: other for number, other in running.items() if other != pid}
        if not ready:
            continue
        order, passed, _, _ = socket.recv_fds(orders, ORDER.size, MOST_PASSED)
        if len(order) < ORDER.size:
            return
        order_kind, number = ORDER.unpack(order)
        if order_kind == KILL:
            _kill(running.pop(number, 0))
            continue
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory; only this trajectory fails
            print(f"cannot start a process for a trajectory: {error}", file=sys.stderr, flush=True)
            pid = -1
        if pid == 0:
            orders.close()
            _play(passed, loaded, spec)
        for descriptor in passed:
            os.close(descriptor)
        if pid > 0:
            running[number] = pid


def _kill(pid: int) -> None:
    """Kill a process and its children; its pid cannot have been reused, since it is not reaped."""
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _play(passed: Sequence[int], loaded: Mapping[str, Loaded], spec: EnvironmentSpec) -> NoReturn:
    """Reply to one trajectory after the other until the other end closes, then exit.

    The descriptors are those of the connection, and, with `environment.endpoint`, of a listener.
    """
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        descriptor, *listeners = passed
        if listeners:
            loaded = {n: replace(code, listener=listeners[0]) for n, code in loaded.items()}
        _answer_all(UserEnd(descriptor), loaded, spec.sandbox.allow_cpu)
    except (ConnectionError, EOFError):
        pass  # the other end is gone
    except BaseException:  # noqa: BLE001 - process boundary
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer_all(driver: UserEnd, loaded: Mapping[str, Loaded], begins: Callable[[], None]) -> None:
    """Answer messages until the other end closes; call `begins` before each answer."""
    episode: Any = None
    while True:
        for number, message in driver.receive():
            begins()
            began = time.perf_counter()
            try:
                if "seeds" in message:
                    episode = begin(loaded[message["name"]], message["seeds"])
                    answer = episode.reset(message["row"])
                else:
                    answer = episode.step(**message)
            except Exception as error:  # noqa: BLE001 - a user's class may raise anything
                answer = {"failed": DESCRIBE(error) + place_of(error)}
            driver.send(number, answer | {"busy_s": time.perf_counter() - began})


class _Nothing(Environment):
    """An environment that the forking process plays as a warm-up."""

    def step(self, text: str) -> Observation:
        return Observation(text)


def _warm_up() -> None:
    """Run the code that every trajectory runs until Python has specialized it.

    Otherwise each forked process would specialize it itself, and so copy its memory pages.
    """
    for _ in range(WARM_UPS):
        ours, theirs = socket.socketpair()
        with ours, suppress(EOFError):
            ours.sendall(packed([(0, {"name": "", "seeds": (0, 1), "row": {}})]))
            ours.sendall(packed([(1, {"text": "", "player": ""})]))
            ours.shutdown(socket.SHUT_WR)
            with closing(UserEnd(theirs.detach())) as driver:
                _answer_all(driver, {"": Loaded(_Nothing, {}, [])}, lambda: None)
