"""The program that runs environments: it loads their code, then forks processes for trajectories.

`workers.agents.host` starts it in a sandbox, and tells it which processes to start and kill.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from verl_like.errors import ConfigError
from verl_like.process.supervisor import PR_SET_PDEATHSIG, prctl, supervise
from workers.agents.environment import Environment, Observation
from workers.agents.episode import begin
from workers.agents.load_environment import EnvironmentSpec, Loaded
from workers.rewards.channel import FunctionEnd
from workers.rewards.process import describe_error, place_of

FROM_JSON = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
TO_JSON = json.JSONEncoder().encode
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
    spec: EnvironmentSpec = control.recv()
    supervise(control.fileno(), spec.sandbox, lambda data: serve(data, spec), PREFIX, MOST_OUTPUT)


def serve(descriptor: int, spec: EnvironmentSpec) -> None:
    """Load the code, then fork a process for each requested trajectory."""
    end = FunctionEnd(os.dup(descriptor))
    end.send([os.getpid(), os.getcwd()])
    try:
        loaded = spec.load_all()
    except ConfigError as error:
        end.send([str(error), {}])
        return
    except BaseException as error:  # noqa: BLE001 - a user's file may raise anything
        traceback.print_exc()
        end.send([f"{spec.setting} could not be loaded: {type(error).__name__}: {error}", {}])
        return
    kinds = {
        name: [[tool.schema for tool in code.tools], code.columns, code.players]
        for name, code in loaded.items()
    }
    end.send([None, kinds])
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
        _answer_all(descriptor, loaded, spec.sandbox.allow_cpu)
    except ConnectionError:
        pass  # the other end is gone
    except BaseException:  # noqa: BLE001 - process boundary
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _answer_all(descriptor: int, loaded: Mapping[str, Loaded], begins: Callable[[], None]) -> None:
    """Reply to every line with a line of the same order; call `begins` before each reply."""
    episode: Any = None
    pid = os.getpid()
    for line in _lines(descriptor):
        message = FROM_JSON(line.decode(), 0)[0]
        order = message.pop("order")
        begins()
        began = time.perf_counter()
        try:
            if episode is None or "seeds" in message:
                episode = begin(loaded[message["name"]], tuple(message["seeds"]))
                answer = episode.reset(message["row"])
            else:
                answer = episode.step(**message)
        except Exception as error:  # noqa: BLE001 - a user's class may raise anything
            answer = {
                "failed": describe_error(error, sandbox="environment.sandbox") + place_of(error)
            }
        if os.getpid() != pid:  # a fork that the code made and that went on
            os._exit(0)
        answer |= {"busy_s": time.perf_counter() - began, "order": order}
        reply = TO_JSON(answer).encode() + b"\n"
        while reply:
            reply = reply[os.write(descriptor, reply) :]


def _lines(descriptor: int) -> Iterator[bytes]:
    rest = b""
    while chunk := os.read(descriptor, 65536):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


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
        with ours, theirs:
            ours.sendall(
                b'{"order": 1, "name": "", "seeds": [0, 1], "row": {}}\n'
                b'{"order": 2, "text": "", "player": ""}\n'
            )
            ours.shutdown(socket.SHUT_WR)
            _answer_all(theirs.fileno(), {"": Loaded(_Nothing, {}, [])}, lambda: None)
