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
run under one supervisor, in a sandbox (`verl_like.process.supervisor`). Answers are JSON, one per
line.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import resource
import selectors
import socket
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from verl_like.errors import ConfigError, nearest
from verl_like.process.supervisor import END_S, Supervised
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.process import KILL, OPEN, ORDER
from workers.agents.router import Router
from workers.columns import ENVIRONMENT
from workers.rewards.channel import DriverEnd, NoAnswerError

logger = logging.getLogger(__name__)

BROKEN, LATE = "environment", "deadline"
"""Reasons for failures: an error of the environment, or a missed deadline."""
START_S = 60.0
"""Time limit for loading the code."""
TO_JSON = json.JSONEncoder(default=str).encode
"""Encodes messages as JSON; values that JSON cannot represent are sent as their `str`."""
LONGEST_LINE = 2**24
"""Maximum bytes of an answer."""
ENDED_S = 0.5
"""Seconds until the end of an environment's process is reported as a failure."""


@dataclass
class _Process:
    number: int
    socket: socket.socket
    waiting: list[Mapping[str, Any]] = field(default_factory=list)
    """Messages to send once earlier ones are answered."""
    rest: bytes = b""
    order: int = 0
    """The number of its last message, which the reply repeats."""
    step_timeout_s: float = 0.0
    until: float = 0.0
    is_busy: bool = False
    has_ended: bool = False
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
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:  # every open trajectory needs a socket
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._spec, self._step_timeout_s = spec, step_timeout_s
        self.num_starts = 0
        """Number of processes that have loaded the code; more than one after a restart."""
        self._open: dict[int, _Process] = {}
        """By number of a trajectory: its process."""
        self._idle: list[_Process] = []
        """Processes for the next trajectories; their previous ones ended without an error."""
        self._numbers = itertools.count()
        self._failed: list[tuple[int, dict[str, Any]]] = []
        self._router: Router | None = None
        self._start_host()

    def _start_host(self) -> None:
        """Start a supervisor, and under it the process that loads the code."""
        self.num_starts += 1
        self._selector = selectors.DefaultSelector()
        spec = self._spec
        if spec.endpoint and self._router is None:
            self._router = Router(spec.endpoint)
        if self._router is not None:
            spec = replace(spec, endpoint=self._router.url)
        supervised = Supervised("workers.agents.process", spec.sandbox.env)
        try:
            supervised.pipe.send(spec)
        finally:
            self._orders = socket.socket(fileno=os.dup(supervised.pipe.fileno()))
            self._channel = DriverEnd(supervised.pipe)
        closing = ExitStack()  # the last callback runs first
        closing.callback(supervised.stop)
        closing.callback(self._channel.close)
        closing.callback(self._orders.close)
        closing.callback(self._selector.close)
        closing.callback(_close_sockets, self._idle)
        self._end = weakref.finalize(self, closing.close)
        self._selector.register(self._orders, selectors.EVENT_READ, None)
        until, failed = time.monotonic() + START_S, f"{self._spec.setting} could not be loaded"
        try:
            pid, supervised.folder = self._channel.receive(until)  # of the process with the code
            if self._router is not None:
                self._router.folder = supervised.folder
            with suppress(AttributeError, ProcessLookupError):  # not on Linux, or it has ended
                handle = os.pidfd_open(pid)
                closing.callback(os.close, handle)
                self._selector.register(handle, selectors.EVENT_READ, None)
            problem, kinds = self._channel.receive(until)
        except TimeoutError:
            problem = (
                f"{self._spec.setting} did not load within {START_S:g} s. If its file does slow "
                "work when it is imported, move this work into `reset`."
            )
        except (EOFError, OSError):
            problem = f"{failed}: its process and its supervisor are gone."
        except NoAnswerError as error:
            problem = f"{failed}: its process {error}. Its output is above."
        except (TypeError, ValueError) as error:
            problem = f"{failed}: it sent an unexpected reply: {error}."
        if problem is not None:
            self._end()
            raise ConfigError(problem)
        self.kinds = {name: Kind(*fields) for name, fields in kinds.items()}
        self._orders.setblocking(True)  # only the channel, a copy of it, needs timeouts

    def _replace_host(self) -> None:
        """Fail all open trajectories with the supervisor's message, and start a new host."""
        cause = "ended"
        try:
            self._channel.receive(time.monotonic() + END_S)
        except NoAnswerError as error:
            cause = str(error)
        except (EOFError, OSError):
            pass  # the supervisor has ended, too
        why = f"the process that all environments share {cause} (limits: environment.sandbox)"
        for number in list(self._open):
            self._fail(number, why)
        self._end()
        self._idle.clear()
        logger.warning(
            "environment: %s. Restarting it (start %s); unfinished trajectories are retried "
            "(environment.retries).",
            why,
            self.num_starts + 1,
        )
        self._start_host()

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
                process.socket.close()
                process = None
        if process is None:
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            process = _Process(next(self._numbers), ours)
            order, passed = ORDER.pack(OPEN, process.number), [theirs]
            with suppress(OSError), ExitStack() as closing:
                closing.enter_context(theirs)
                if self._router is not None:  # without network, a sandbox cannot create a listener
                    listener = closing.enter_context(socket.socket(socket.AF_UNIX))
                    listener.bind(os.path.join(self._router.folder, f"{process.number}.socket"))
                    listener.listen()
                    passed.append(listener)
                # after an error, the message to the process fails
                socket.send_fds(self._orders, [order], [end.fileno() for end in passed])
        process.step_timeout_s = step_timeout_s or self._step_timeout_s
        self._open[number] = process
        self._selector.register(process.socket, selectors.EVENT_READ, number)
        self._send(number, {"name": name_of(self.kinds, row), "seeds": seeds, "row": row})

    def say(self, number: int, text: str, player: str = "", **details: Any) -> None:
        """Send the text of the policy (or of this player) to an environment.

        `details` are for agents.
        """
        self._send(number, {"text": text, "player": player, **details})

    def answers(self, seconds: float) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the answers that arrive within `seconds`, by number of the trajectory.

        The answer {"failed": ...} means that the environment failed.
        """
        now = time.monotonic()
        waits = [p.until for p in self._open.values() if p.is_busy]
        if self._failed or not waits:
            seconds = 0.0
        else:
            seconds = max(0.0, min(seconds, min(waits) - now))
        ready = [key.data for key, _ in self._selector.select(seconds)]
        if None in ready:  # the process that loaded the code has ended
            self._replace_host()
            ready = []
        for number in ready:
            line = self._line_of(number)
            if line is not None:
                yield number, line
        now = time.monotonic()
        for number, process in list(self._open.items()):
            if process.is_busy and now >= process.until:
                if process.has_ended:
                    self._fail(number, "its process has ended")
                else:
                    most = f"environment.step_timeout_s={process.step_timeout_s:g} s"
                    self._fail(number, f"no answer within {most}", LATE)
        failed, self._failed = self._failed, []
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
        if not process.has_ended:
            self._selector.unregister(process.socket)
        if process.is_busy or process.is_agent or process.rest:
            process.socket.close()
            with suppress(OSError):
                self._orders.send(ORDER.pack(KILL, process.number))
        else:
            self._idle.append(process)

    def close(self) -> None:
        """End all processes."""
        for number in list(self._open):
            self.end(number)
        self._end()
        if self._router is not None:
            self._router.close()

    def _send(self, number: int, message: Mapping[str, Any]) -> None:
        process = self._open.get(number)
        if process is None:
            return
        if process.is_busy:  # another player waits for its answer
            process.waiting.append(message)
            return
        process.until, process.is_busy = time.monotonic() + process.step_timeout_s, True
        process.order += 1
        line = TO_JSON({**message, "order": process.order}).encode() + b"\n"
        try:
            with suppress(BlockingIOError):
                line = line[process.socket.send(line) :]
            if line:  # the message is larger than the socket's buffer
                process.socket.settimeout(process.step_timeout_s)
                process.socket.sendall(line)
                process.socket.setblocking(False)
        except TimeoutError as error:
            self._fail(number, f"its process does not accept requests: {error}")
        except OSError:
            self._note_end(process)

    def _note_end(self, process: _Process) -> None:
        """Report a failure a little later, when it is known whether the process ended, and why."""
        if not process.has_ended:
            self._selector.unregister(process.socket)
        process.has_ended = process.is_busy = True
        process.until = time.monotonic() + ENDED_S

    def _line_of(self, number: int) -> dict[str, Any] | None:
        process = self._open.get(number)
        if process is None:
            return None
        try:
            chunk = process.socket.recv(2**20)
        except BlockingIOError:
            return None
        except OSError:
            chunk = b""
        if not chunk:
            self._note_end(process)
            return None
        process.rest += chunk
        if len(process.rest) > LONGEST_LINE:
            self._fail(number, f"its answer has more than {LONGEST_LINE // 2**20} MiB")
            return None
        reply: dict[str, Any] = {}
        while not reply:
            line, newline, process.rest = process.rest.partition(b"\n")
            if not newline:
                process.rest = line
                return None
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                value = None
            if not isinstance(value, dict):
                self._fail(number, f"it answered {line!r:.80}")
                return None
            if process.is_busy and value.pop("order", None) == process.order:
                reply = value  # others reply to no message, or to an earlier one
        process.is_busy = False
        busy = reply.pop("busy_s", 0.0)
        process.busy_s = busy if isinstance(busy, float) else 0.0
        of_players = reply.get("players", {"": reply}).values()
        process.is_agent = any("request" in answer for answer in of_players)
        if "failed" in reply:
            self._fail(number, str(reply["failed"]))
            return None
        if process.waiting:
            self._send(number, process.waiting.pop(0))
        return reply

    def _fail(self, number: int, why: str, reason: str = BROKEN) -> None:
        if number in self._open:
            self._open[number].is_busy = True  # so that the process is not reused
            self.end(number)
            self._failed.append((number, {"failed": why, "reason": reason}))


def _close_sockets(processes: list[_Process]) -> None:
    for process in processes:
        process.socket.close()


def _is_empty(connection: socket.socket) -> bool:
    """Return True if the other end is open and nothing of it is unread."""
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


RECORDED = "recorded_answers"
"""Column with the answers that each row's environment gave, in order."""
OVER = {"failed": "no further answer was recorded", "reason": "environment"}


class RecordedHost:
    """Replays recorded answers, which are in the rows, with the interface of `EnvironmentHost`."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        """Create the host; each recorded trajectory is replayed without other players."""
        self.kinds = {name: replace(kind, players=[]) for name, kind in kinds.items()}
        self._left: dict[int, Iterator[Mapping[str, Any]]] = {}
        self._requested: list[int] = []

    def open(self, number: int, seeds: Any, row: Mapping[str, Any], *_: Any) -> None:
        """Start a trajectory, and request its first answer."""
        self._left[number] = iter(row[RECORDED])
        self._requested.append(number)

    def say(self, number: int, *_: Any, **__: Any) -> None:
        """Request the next answer, whatever the policy's text."""
        self._requested.append(number)

    def answers(self, seconds: float) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the requested answers."""
        numbers, self._requested = self._requested, []
        for number in numbers:
            yield number, next(self._left[number], OVER)

    def busy_s(self, number: int) -> float:
        """Return 0, because no environment is running."""
        return 0.0

    def kill(self, number: int) -> None:
        """Do nothing: there is no process."""

    def end(self, number: int) -> None:
        """Do nothing: there are no resources."""
