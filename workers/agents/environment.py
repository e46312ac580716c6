"""The interface of environments: a class that replies to a policy, in a separate process.

    class Guess(Environment):
        def reset(self, row, rng):
            self.secret = "abcdefghij"[rng.integers(10)]
            return "Guess my letter, a to j."

        def step(self, text):
            if text.strip() == self.secret:
                return TrajectoryEnd(reward=1.0)
            return Observation("later" if text.strip() < self.secret else "earlier")

Other public methods of the class, and the functions in `environment.tools`, are tools that the
policy can call. If a class has tools but no `step`, the first response without a tool call ends the
trajectory. Methods may be `async`. This module does not import torch, because every environment's
process loads it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.random  # numpy would load it lazily, and so in every forked process again

from verl_like.errors import nearest
from verl_like.registry import Registry
from workers.agents.calls import call_like
from workers.agents.tools import Tool, answer_call, waited

if TYPE_CHECKING:
    from workers.agents.load_environment import Loaded


@dataclass(frozen=True)
class Observation:
    """An environment's reply after which the policy takes another turn.

    Args:
        text: the observation that the policy reads next.
        reward: reward of the policy's last text.
    """

    text: str
    reward: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"the text of an Observation is {_kind(self.text)}, not a string")
        _finite(self.reward)


@dataclass(frozen=True)
class TrajectoryEnd:
    """An environment's reply that ends the trajectory.

    Args:
        reward: reward of the policy's last text.
        truncated: True if a limit, not the task, ended it; counts like `environment.max_turns`.
    """

    reward: float = 0.0
    truncated: bool = False

    def __post_init__(self) -> None:
        _finite(self.reward)


class Environment:
    """Base class for environments; each trajectory has its own instance, in a separate process.

        class Guess(Environment):
            def reset(self, row, rng):
                self.number = rng.integers(10)
                return "Guess my number, from 0 to 9."

            def step(self, text):
                if text.strip() == str(self.number):
                    return TrajectoryEnd(reward=1.0)
                return Observation("No. Guess again.")

    The caller's loop, where `generate` is the policy:

        env = Guess(**kwargs)                 # `environment.kwargs`
        observation = env.reset(row, rng)     # None adds nothing to the row's prompt
        reply = env.step(generate(observation))
        while isinstance(reply, Observation):
            reply = env.step(generate(reply.text))

    Override `reset` and `step`. Other public methods are tools, which the policy can call, except
    `get_reward`, static methods and class methods. A class that has tools needs no `step`: the
    first response without a tool call then ends the trajectory, whose reward is `get_reward()`, or
    without this method the attribute `reward`, by default 0.

    Attributes:
        players: names of the trained players, if there are several; each has its own trajectory.
        rng: a `numpy.random.Generator` with a separate seed per sample.
        rng_seed: the seed of `rng`.
    """

    players: ClassVar[Sequence[str]] = ()
    """Names of the trained players, if there are several; each has its own trajectory."""
    rng_seed: int | None = None
    """The seed of `rng`, set for each sample; None draws a random one."""

    @cached_property
    def rng(self) -> Any:
        """A `numpy.random.Generator` with a separate seed per sample, created at its first use."""
        return np.random.default_rng(self.rng_seed)

    def reset(self, row: Mapping[str, Any], rng: Any) -> Any:
        """Start a trajectory; return the first observation, or None to add nothing to the prompt.

        With several players, return a dict that maps players to their first observations. These
        players take the first turns. Parameters with names of columns get the row's values.

        Args:
            row: the row of the data, with all its columns.
            rng: a `numpy.random.Generator` with the same seed for all samples of a prompt.
        """
        return None

    def step(self, text: str) -> Any:
        """Reply to the policy's text with an `Observation` or a `TrajectoryEnd`.

        With several players, define `step(self, text, player)`, and return a dict that maps players
        to their replies. A player that gets an `Observation` takes its next turn.

        Args:
            text: the text that the policy has generated in this turn.
        """
        raise NotImplementedError


class EnvironmentAdapter(Environment):
    """Base class of environments with an id: `environment=PREFIX:ID`, or FILE.py:CLASS:ID.

        class Level(EnvironmentAdapter):                   # environment=levels.py:Level:7
            def reset(self, row, rng):
                return f"level {self.id}"

    Each configured environment is a subclass with its `id` and `kwargs`.

    Attributes:
        id: the text after the prefix or class, such as `7`.
        kwargs: `environment.kwargs`.
        tools: tools in addition to the class's methods.
    """

    id: ClassVar[str]
    """The text after the prefix or class."""
    kwargs: ClassVar[Mapping[str, Any]]
    """`environment.kwargs`."""
    tools: ClassVar[Sequence[Tool]] = ()
    """Tools in addition to the class's methods."""

    @classmethod
    def id_in_full(cls, name: str) -> str:
        """Return the id with absolute file names, because each process has its own folder."""
        return name

    @classmethod
    def prepare(cls) -> None:
        """Reject an unknown id; called before processes of trajectories are forked.

        The forked processes share the modules that this method imports.
        """


ENVIRONMENT_ADAPTERS: Registry[str] = Registry("adapter of environments")
"""By prefix: module and name of an `EnvironmentAdapter`, or of a function (id, kwargs) -> agent."""
for _prefix, _class in {
    "gem": "Gem",
    "gymnasium": "Gymnasium",
    "harbor": "Harbor",
    "mcp": "MCP",
    "openenv": "OpenEnv",
    "reasoning_gym": "ReasoningGym",
    "skyrl_gym": "SkyRLGym",
    "textarena": "TextArena",
    "verifiers": "agent",
}.items():
    ENVIRONMENT_ADAPTERS.register(_prefix)(f"workers.agents.adapters.{_prefix}:{_class}")


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
            names = {p.name for p in self._loaded.of_reset}
            takes_all = any(p.kind is p.VAR_KEYWORD for p in self._loaded.of_reset)
            arguments = {**row, "row": dict(row)}
            if "rng" in names:
                arguments["rng"] = np.random.default_rng(self._seeds[0])
            chosen = {
                name: value
                for name, value in arguments.items()
                if name in names or takes_all and name in row
            }
            if missing := [name for name in self._loaded.columns if name not in chosen]:
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

    def _first(self, text: Any) -> dict[str, Any]:
        if text is not None and not isinstance(text, str):
            raise TypeError(f"reset returned {_kind(text)}, not a text or None")
        return {"text": text}

    def _of_players(
        self, method: str, answers: Any, read: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Check the dict of replies that a method returned, and convert each reply."""
        players = self._loaded.players
        if not isinstance(answers, Mapping) or not {*answers} <= {*players}:
            raise TypeError(
                f"{method} returned {_kind(answers)}; expected a dict with keys from "
                f"{', '.join(players)}"
            )
        replies = {player: read(answer) for player, answer in answers.items()}
        if early := sorted({*replies} - self._waiting):
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
                replies[player] = {"text": answers[player].text}
        self._silent -= {*replies}
        return {"players": replies}

    def step(self, text: str, player: str = "") -> dict[str, Any]:
        """Return the reply to this text: messages or the trajectory's end, and the text's reward.

        With several players, return such replies by player.
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
        if player:
            self._speaking.discard(player)
            self._waiting.add(player)
            return self._of_players("step", waited(self._env.step(text, player)), self._read)
        unread_call = call_like(text) if self._tools else ""
        if self._loaded.has_step:
            answer = self._read(waited(self._env.step(text)))
        else:  # as in TRL
            if hasattr(self._env, "get_reward"):
                reward = waited(self._env.get_reward())
            else:
                reward = getattr(self._env, "reward", 0.0)
            answer = {"end": True, "reward": _finite(reward)}
        return answer | ({"call_like": unread_call} if unread_call else {})

    def _read(self, answer: Any) -> dict[str, Any]:
        if isinstance(answer, TrajectoryEnd):
            reward = _finite(answer.reward)
            return {"end": True, "reward": reward, "truncated": bool(answer.truncated)}
        if not isinstance(answer, Observation):
            raise TypeError(f"step returned {_kind(answer)}, not an Observation or a TrajectoryEnd")
        message = {"role": "user", "content": answer.text}
        return {"messages": [message], "reward": _finite(answer.reward)}


def seed_globals(seed: int) -> None:
    """Seed Python's and numpy's global generators, which user code may use."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


def _finite(reward: Any) -> float:
    try:
        number = math.nan if isinstance(reward, str) else float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(
            f"the reward is {reward!r:.80}, not a finite number. Return a number, as in "
            "TrajectoryEnd(reward=1.0)"
        )
    return number


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
