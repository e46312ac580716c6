"""The program that environments run in: it loads their code, then forks one for each trajectory.

`workers.agents.host` starts it, in a sandbox, and tells it what to open and what to kill.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import NoReturn

from verl_like.errors import ConfigError
from verl_like.process.supervisor import PR_SET_PDEATHSIG, prctl, supervise
from workers.agents.environment import EnvironmentSpec, Loaded, Played
from workers.rewards.channel import FunctionEnd
from workers.rewards.process import in_words, place_of

ORDER = struct.Struct("!cQ")
"""What it is told: open or kill, and a number."""
OPEN, KILL = b"o", b"k"
REAP_S = 0.2
"""Time between two looks for processes that have ended."""


def main(control: Connection) -> None:
    """Serve the process that started this one, until it closes the socket."""
    spec: EnvironmentSpec = control.recv()
    supervise(control.fileno(), spec.sandbox, lambda data: serve(data, spec))


def serve(descriptor: int, spec: EnvironmentSpec) -> None:
    """Load the code, then fork a process for each trajectory that is asked for."""
    end = FunctionEnd(os.dup(descriptor))
    end.send([os.getpid(), os.getcwd()])
    try:
        loaded = spec.load()
    except ConfigError as error:
        end.send([str(error), [], []])
        return
    except BaseException as error:  # noqa: BLE001 - a user's file may raise anything
        traceback.print_exc()
        end.send(
            [f"environment={spec.path} is not loaded: {type(error).__name__}: {error}", [], []]
        )
        return
    end.send([None, [tool.schema for tool in loaded.tools], loaded.columns])
    _ = loaded.has_step  # as tools and columns: read here, and in no trajectory's process
    gc.collect()
    gc.freeze()  # what is loaded is then not copied page by page where a fork collects

    orders = socket.socket(fileno=descriptor)
    running: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([orders], [], [], REAP_S)
        _reap(running)
        if not ready:
            continue
        order, descriptors, _, _ = socket.recv_fds(orders, ORDER.size, 1)
        if len(order) < ORDER.size:
            return
        what, number = ORDER.unpack(order)
        if what == KILL:
            _kill(running.pop(number, 0))
            continue
        (theirs,) = descriptors
        try:
            pid = os.fork()
        except OSError as error:  # too many processes, or no memory: one trajectory has none
            print(f"no process for a trajectory: {error}", file=sys.stderr, flush=True)
            os.close(theirs)
            continue
        if pid == 0:
            orders.close()
            _play(socket.socket(fileno=theirs), loaded, spec)
        os.close(theirs)
        running[number] = pid


def _reap(running: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (pid := os.waitpid(-1, os.WNOHANG)[0]) != 0:
            for number in [number for number, its in running.items() if its == pid]:
                del running[number]


def _kill(pid: int) -> None:
    """Its whole session; one that has ended is not reaped yet, so its number is no other's."""
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _play(asks: socket.socket, loaded: Loaded, spec: EnvironmentSpec) -> NoReturn:
    """Answer for one trajectory until the other end closes; the process then ends."""
    try:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        episode: Played | None = None
        for line in asks.makefile("rb"):
            asked = json.loads(line)
            spec.sandbox.allow_cpu()
            began = time.perf_counter()
            time.sleep(asked.pop("delay_s", 0.0))
            try:
                if episode is None or "seeds" in asked:
                    episode = loaded.begin(tuple(asked["seeds"]))
                    answer = episode.reset(asked["row"])
                else:
                    answer = episode.step(**asked)
            except Exception as error:  # noqa: BLE001 - a user's class may raise anything
                answer = {"failed": in_words(error) + place_of(error)}
            answer["busy_s"] = time.perf_counter() - began
            asks.sendall(json.dumps(answer).encode() + b"\n")
    except ConnectionError:
        pass  # the other end is gone
    except BaseException:  # noqa: BLE001 - this is the edge of the process
        with suppress(BaseException):
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
