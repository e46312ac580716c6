"""Processes of environments: one per trajectory, forked from a process that has loaded their code.

    host = EnvironmentHost(spec, step_timeout_s)   # raises a ConfigError for invalid code
    host.open(7, seeds, row)                       # the first answer comes from `reset` ...
    host.say(7, "42")                              # ... and the next one from `step`
    for number, answer in host.answers(seconds):   # answers that have arrived, or failures
        ...
    host.end(7); host.close()

A process runs one trajectory at a time, so concurrent trajectories do not share global state, such
as Python's and numpy's random number generators. When a trajectory ends without an error, and
nothing of it is still running, the next one reuses its process, with its own seeds. All processes
run under one supervisor, in a sandbox (`verl_like.process.pool`).
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from verl_like.errors import ConfigError, nearest
from verl_like.process.machine import allow_many_open_files
from verl_like.process.pool import Process, ProcessFailure, ProcessPool, UserCode
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.process import KILL, OPEN, ORDER
from workers.agents.router import Router
from workers.columns import ENVIRONMENT

logger = logging.getLogger(__name__)

BROKEN, LATE = "environment", "deadline"
"""Reasons for failures: an error of the environment, or a missed deadline."""
START_S = 60.0
"""Time limit for loading the code."""
TO_JSON = json.JSONEncoder(default=str).encode
"""Encodes rows as JSON; values that JSON cannot represent are sent as their `str`."""


@dataclass(eq=False, kw_only=True)
class _Fork(Process):
    """The process of one trajectory after the other."""

    number: int
    trajectory: int = 0
    step_timeout_s: float = 0.0
    is_agent: bool = False
    """True if its last answer was an agent's request, so that a program waits for a response."""
    busy_s: float = 0.0
    """Seconds that the process worked on its last answer."""


@dataclass(frozen=True)
class Kind:
    """The tools, columns and players that the code of an environment declares."""

    tools: list[dict[str, Any]]
    """Schemas of the tools that the policy can call."""
    columns: list[str] = field(default_factory=list)
    """Columns that it requires in a row."""
    players: list[str] = field(default_factory=list)
    """Names of its trained players; empty if there is only one."""


def name_of(kinds: Mapping[str, Kind], row: Mapping[str, Any]) -> str:
    """Return the name of a row's environment; a single environment has the name ""."""
    name = "" if "" in kinds else str(row.get(ENVIRONMENT))
    if name not in kinds:
        raise ConfigError(
            f"environment: a row's column {ENVIRONMENT!r} is {row.get(ENVIRONMENT)!r}, but it must "
            f"be one of {', '.join(kinds)} (environment.paths).{nearest(name, kinds)}"
        )
    return name


class EnvironmentHost:
    """Starts the environments of one rollout process, and communicates with them."""

    def __init__(self, spec: EnvironmentSpec, step_timeout_s: float) -> None:
        """Start the process that loads the code; raise a `ConfigError` if it does not load.

        Each answer of an environment may take at most `step_timeout_s` seconds.
        """
        allow_many_open_files()  # every open trajectory needs a socket
        self._step_timeout_s, self._num_starts = step_timeout_s, 0
        self._open: dict[int, _Fork] = {}
        """By number of a trajectory: its process."""
        self._idle: list[_Fork] = []
        """Processes for the next trajectories; their previous ones ended without an error."""
        self._numbers = itertools.count()
        self._router = Router(spec.endpoint) if spec.endpoint else None
        self._code = UserCode(
            "workers.agents.process",
            replace(spec, endpoint=self._router.url) if self._router is not None else spec,
            spec.setting,
            lambda kinds: {name: Kind(*fields) for name, fields in kinds.items()},
            START_S,
            "If its file does slow work when it is imported, move this work into `reset`.",
        )
        self._pool = ProcessPool()
        self._load()

    def _load(self) -> None:
        """Start the process that loads the code and forks the others."""
        self._num_starts += 1
        self._loaded = self._pool.start(self._code)
        self.kinds: dict[str, Kind] = self._pool.wait_until_loaded(self._loaded)
        if self._router is not None and self._loaded.supervised is not None:
            self._router.folder = self._loaded.supervised.folder

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools of all environments."""
        return [tool for kind in self.kinds.values() for tool in kind.tools]

    def open(
        self,
        number: int,
        seeds: tuple[int, int],
        row: Mapping[str, Any],
        step_timeout_s: float | None = None,
    ) -> None:
        """Start a trajectory with this row, in an idle or a new process.

        `step_timeout_s` replaces the host's.
        """
        process = None
        while self._idle and process is None:
            process = self._idle.pop()
            if not _is_empty(process.socket):  # it has ended, or sent what nobody asked for
                self._kill(process)
                process = None
        process = process or self._fork()
        process.trajectory = number
        process.step_timeout_s = step_timeout_s or self._step_timeout_s
        self._open[number] = process
        message = {"name": name_of(self.kinds, row), "seeds": seeds}
        self._send(number, {**message, "row": json.loads(TO_JSON(row))})

    def _fork(self) -> _Fork:
        ours, theirs = socket.socketpair()
        process = _Fork(ours, number=next(self._numbers))
        order, passed = ORDER.pack(OPEN, process.number), [theirs]
        with suppress(OSError), ExitStack() as closing:
            closing.enter_context(theirs)
            if self._router is not None:  # without network, a sandbox cannot create a listener
                listener = closing.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(os.path.join(self._router.folder, f"{process.number}.socket"))
                listener.listen()
                passed.append(listener)
            # after an error, the message to the process fails
            socket.send_fds(self._loaded.socket, [order], [end.fileno() for end in passed])
        self._pool.add(process)
        return process

    def say(self, number: int, text: str, player: str = "", **details: Any) -> None:
        """Send the text of the policy (or of this player) to an environment.

        `details` are for agents.
        """
        self._send(number, {"text": text, "player": player, **details})

    def answers(self, seconds: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the answers that arrive within `seconds`, by number of the trajectory.

        The answer {"failed": ...} means that the environment failed.
        """
        for process, _, answer in self._pool.answers(seconds):
            if not isinstance(process, _Fork):
                yield from self._load_again(answer.words)
            elif isinstance(answer, ProcessFailure) and process in self._idle:
                self._idle.remove(process)
                self._kill(process)
            elif isinstance(answer, ProcessFailure) and answer.is_late:
                most = f"environment.step_timeout_s={process.step_timeout_s:g} s"
                yield self._failed(process, f"no answer within {most}", LATE)
            elif isinstance(answer, ProcessFailure):
                yield self._failed(process, f"its process {answer.words}")
            elif not isinstance(answer, dict):
                yield self._failed(process, f"it answered {answer!r:.80}")
            else:
                busy_s = answer.pop("busy_s", 0.0)
                process.busy_s = busy_s if isinstance(busy_s, float) else 0.0
                of_players = answer.get("players", {"": answer}).values()
                process.is_agent = any("request" in reply for reply in of_players)
                if "failed" in answer:
                    yield self._failed(process, str(answer["failed"]))
                else:
                    yield process.trajectory, answer

    def _failed(
        self, process: _Fork, words: str, reason: str = BROKEN
    ) -> tuple[int, dict[str, Any]]:
        del self._open[process.trajectory]
        self._kill(process)
        return process.trajectory, {"failed": words, "reason": reason}

    def _load_again(self, words: str) -> Iterator[tuple[int, dict[str, Any]]]:
        """Load the code in a new process, and fail all open trajectories."""
        why = f"the process that all environments share {words} (limits: environment.sandbox)"
        for process in self._idle:
            self._pool.end(process)
        self._idle.clear()
        failed = [self._failed(process, why) for process in [*self._open.values()]]
        logger.warning(
            "environment: %s. Restarting it (start %s); unfinished trajectories are retried "
            "(environment.retries).",
            why,
            self._num_starts + 1,
        )
        self._load()
        yield from failed

    def busy_s(self, number: int) -> float:
        """Return the seconds that an environment worked on its last answer; inf after a failure."""
        process = self._open.get(number)
        return math.inf if process is None else process.busy_s

    def end(self, number: int) -> None:
        """End a trajectory; reuse its process unless something is still running in it."""
        process = self._open.pop(number, None)
        if process is None:
            return
        if process.waiting or process.is_agent or process.received or process.has_ended:
            self._kill(process)
        else:
            self._idle.append(process)

    def close(self) -> None:
        """End all processes."""
        self._open.clear()
        self._idle.clear()
        self._pool.close()
        if self._router is not None:
            self._router.close()

    def _send(self, number: int, message: Mapping[str, Any]) -> None:
        process = self._open.get(number)
        if process is not None:
            self._pool.send(process, {number: message}, process.step_timeout_s)

    def _kill(self, process: _Fork) -> None:
        self._pool.end(process)
        with suppress(OSError):
            self._loaded.socket.send(ORDER.pack(KILL, process.number))


def _is_empty(connection: socket.socket) -> bool:
    """Return True if the other end is open and nothing of it is unread."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
