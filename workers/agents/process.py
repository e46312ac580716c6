"""The program that runs environments: it loads their code, then forks processes for trajectories.

`workers.agents.host` starts it in a sandbox, and tells it which processes to start and kill.
Each of these processes runs one trajectory at a time:

    episode = begin(loaded, seeds)
    reply = episode.reset(row)
    reply = episode.step(text)          # until the reply has the key "end"

This module does not import torch, because every environment's process loads it.
"""

from __future__ import annotations

import gc
import importlib
import os
import random
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
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from verl_like.errors import nearest
from verl_like.process.pool import UserEnd, describe_error, pack_messages
from verl_like.process.supervisor import die_with_parent, supervise
from workers.agents.calls import call_like
from workers.agents.environment import (
    Environment,
    Observation,
    TrajectoryEnd,
    answer_call,
    finite_reward,
    repr_of,
    waited,
)
from workers.agents.load_environment import EnvironmentSpec, Loaded
from workers.rewards.outcome import place_of
from workers.thoughts import split_thoughts

if TYPE_CHECKING:
    from workers.agents.gateway import AgentEpisode


DESCRIBE = partial(describe_error, sandbox="environment.sandbox")
ORDER = struct.Struct("!cQ")
"""Format of an order: open or kill, and the number of the process."""
OPEN, KILL = b"o", b"k"
MAX_PASSED = 2
"""Maximum number of descriptors that come with an order."""
WARM_UPS = 16
"""Number of calls that warm a function up; Python specializes it after a few calls."""
PREFIX = b"(environment) "
"""Prefix of each line that environments print."""
MAX_OUTPUT = 2**16
"""Bytes that all environments of this program together may print; later output is dropped."""
REAP_S = 0.2
"""Interval for reaping ended processes."""


def main(control: Connection) -> None:
    """Serve the process that started this one, until it closes the socket."""
    spec, folder, _ = control.recv()
    supervise(control.fileno(), folder, spec.sandbox, partial(serve, spec=spec), PREFIX, MAX_OUTPUT)


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
        order, passed, _, _ = socket.recv_fds(orders, ORDER.size, MAX_PASSED)
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
        die_with_parent()
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
            ours.sendall(pack_messages([(0, {"name": "", "seeds": (0, 1), "row": {}})]))
            ours.sendall(pack_messages([(1, {"text": "", "player": ""})]))
            ours.shutdown(socket.SHUT_WR)
            with closing(UserEnd(theirs.detach())) as driver:
                _answer_all(driver, {"": Loaded(_Nothing, {}, [])}, lambda: None)


def begin(loaded: Loaded, seeds: tuple[int, int]) -> Episode | AgentEpisode:
    """Create the environment or agent of one trajectory."""
    if loaded.agent is None:
        return Episode(loaded, seeds)
    from workers.agents.gateway import AgentEpisode, AgentSession

    seed_globals(seeds[1])
    rng = np.random.default_rng(seeds[0])
    session = AgentSession(loaded.parse, loaded.players, loaded.reuses_replies)
    url, listener = loaded.endpoint, loaded.listener
    return AgentEpisode(loaded.agent, loaded.kwargs, rng, session, url, listener)


class Episode:
    """One environment and its tools, in the process that runs it."""

    def __init__(self, loaded: Loaded, seeds: tuple[int, int]) -> None:
        """Create the environment; `seeds` has the prompt's seed and this sample's seed."""
        self._seeds = seeds
        seed_globals(seeds[0])
        self._env: Any = None
        if loaded.cls is not None:
            self._env = loaded.cls(**loaded.kwargs)
            if isinstance(self._env, Environment):
                self._env.rng_seed = seeds[1]
            elif not hasattr(self._env, "rng"):
                self._env.rng = np.random.default_rng(seeds[1])
        self._tools = {tool.name: tool for tool in loaded.tools}
        self._loaded = loaded
        self._silent = set(loaded.players)
        """Players that have not had an observation yet."""
        self._waiting = set(loaded.players)
        """Players that have not ended and whose turn it is not."""
        self._speaking: set[str] = set()

    def reset(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return {"text": the first observation or None}.

        With several players, return {"players": such a dict for each player that starts}.
        """
        text = None
        if self._env is not None:  # pass the parameters of `reset`: columns, the row, the rng
            names = {p.name for p in self._loaded.reset_parameters}
            takes_all = any(p.kind is p.VAR_KEYWORD for p in self._loaded.reset_parameters)
            arguments = {**row, "row": dict(row)}
            if "rng" in names:
                arguments["rng"] = np.random.default_rng(self._seeds[0])
            chosen = {
                name: value
                for name, value in arguments.items()
                if name in names or takes_all and name in row
            }
            missing = [name for name in self._loaded.columns if name not in chosen]
            if missing:
                raise TypeError(
                    f"reset has the parameter {missing[0]!r}, and the row has no such column."
                    f"{nearest(missing[0], [*arguments, 'rng'])} Its parameters are columns of "
                    "the row, row (all columns) and rng, as in reset(self, row, rng)"
                )
            text = waited(self._env.reset(**chosen))
        seed_globals(self._seeds[1])
        if self._loaded.players:
            return self._of_players("reset", text, self._first)
        return self._first(text)

    def _first(self, answer: Any) -> dict[str, Any]:
        if isinstance(answer, Observation):
            if answer.reward:
                raise ValueError("reset returned a reward, before the first turn")
            answer = answer.content
        elif answer is not None and not isinstance(answer, str):
            raise TypeError(f"reset returned {repr_of(answer)}, not a text, an Observation or None")
        return {"text": answer}

    def _of_players(
        self, method: str, answers: Any, read: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Check the dict of replies that a method returned, and convert each reply."""
        players = self._loaded.players
        if not isinstance(answers, Mapping) or not {*answers} <= {*players}:
            raise TypeError(
                f"{method} returned {repr_of(answers)}; expected a dict with keys from "
                f"{', '.join(players)}"
            )
        replies = {player: read(answer) for player, answer in answers.items()}
        early = sorted({*replies} - self._waiting)
        if early:
            raise ValueError(
                f"{method} returned a reply for {early[0]!r}, but this player has not spoken since "
                "the last reply, or has left"
            )
        self._waiting -= {*replies}
        self._speaking |= {player for player in replies if "end" not in replies[player]}
        if self._waiting and not self._speaking:
            raise ValueError(
                f"{method} gives no player the next turn, but the players "
                f"{sorted(self._waiting)} still wait for a reply"
            )
        for player in self._silent & {*replies}:
            if "messages" in replies[player]:
                if answers[player].reward:
                    raise ValueError(f"{method} rewards {player!r} before its first turn")
                replies[player] = {"text": answers[player].content}
        self._silent -= {*replies}
        return {"players": replies}

    def step(
        self, text: str, player: str = "", hides_thoughts: bool = False, is_open: bool = False
    ) -> dict[str, Any]:
        """Return the reply to this text: messages or the trajectory's end, and the text's reward.

        With several players, return such replies by player. With `hides_thoughts`, special tokens
        enclose reasoning, which the environment does not get; with `is_open`, the prompt has its
        opening.
        """
        calls = self._loaded.parse(text)[0] if self._tools else []
        if calls:
            answers = [answer_call(call, self._tools, self._env) for call in calls]
            messages = [
                {"role": "tool", "name": call.name, "content": reply}
                for call, (reply, _) in zip(calls, answers, strict=True)
            ]
            errors = sum(failed for _, failed in answers)
            counts = {"calls": len(calls), "errors": errors}
            observation = {"messages": messages, "reward": 0.0, **counts}
            return {"players": {player: observation}} if player else observation
        unread_call = call_like(text) if self._tools else ""
        if hides_thoughts:
            text = split_thoughts(text, is_open)[1]
        if player:
            self._speaking.discard(player)
            self._waiting.add(player)
            return self._of_players("step", waited(self._env.step(text, player)), self._read)
        if self._loaded.has_step:
            answer = self._read(waited(self._env.step(text)))
        else:  # as in TRL
            if hasattr(self._env, "get_reward"):
                reward = waited(self._env.get_reward())
            else:
                reward = getattr(self._env, "reward", 0.0)
            answer = {"end": True, "reward": finite_reward(reward)}
        return answer | ({"call_like": unread_call} if unread_call else {})

    def _read(self, answer: Any) -> dict[str, Any]:
        if isinstance(answer, TrajectoryEnd):
            reward = finite_reward(answer.reward)
            return {"end": True, "reward": reward, "truncated": bool(answer.truncated)}
        if not isinstance(answer, Observation):
            raise TypeError(
                f"step returned {repr_of(answer)}, not an Observation or a TrajectoryEnd"
            )
        message = {"role": "user", "content": answer.content}
        return {"messages": [message], "reward": finite_reward(answer.reward)}


def seed_globals(seed: int) -> None:
    """Seed Python's and numpy's global generators, which user code may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
