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

import inspect
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.random  # numpy would load it lazily, and so in every forked process again

from verl_like.errors import ConfigError, nearest
from verl_like.process.sandbox import Sandbox
from verl_like.registry import Registry, load_from, load_object
from workers.agents.calls import FORMS, Parser, call_like, of_user, parse
from workers.agents.tools import NO_TOOLS, Tool, answer_call, waited

if TYPE_CHECKING:
    from workers.agents.gateway import AgentEpisode


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


@dataclass(frozen=True)
class EnvironmentSpec:
    """The configured environments, from which their processes load code and tools."""

    path: str | Mapping[str, str] = ""
    """FILE.py:NAME, package.module:NAME or PREFIX:ID of a class or agent, or a dict of these.

    If "", there are only tools.
    """
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the class or agent; with several environments, a dict of arguments by name."""
    tools: Sequence[str] = ()
    """Paths of functions, FILE.py:FUNCTION or package.module:FUNCTION."""
    sandbox: Sandbox = field(default_factory=Sandbox)
    endpoint: str = ""
    """ADDRESS:PORT for agents on other machines, or "". The host replaces it with its router's URL.
    """
    reuses_replies: bool = False
    """True if an agent's repeated request gets the reply of the first one."""
    tool_call_parser: Sequence[str] = ()
    """Names of `workers.agents.calls.FORMS`, or the path of a parser; empty means all formats."""

    @property
    def setting(self) -> str:
        """The setting that names the code, for error messages."""
        return f"environment={self.path}" if self.path else f"tools={[*self.tools]}"

    def load_all(self) -> dict[str, Loaded]:
        """Load all environments, by name; a single environment has the name ""."""
        if isinstance(self.path, str):
            return {"": self.load()}
        return {
            name: replace(self, path=path, kwargs=self.kwargs.get(name, {})).load()
            for name, path in self.path.items()
        }

    def load(self) -> Loaded:
        """Load the class or agent and the functions; raise a `ConfigError` if one is not usable."""
        assert isinstance(self.path, str), "load_all loads several environments"
        cls, kwargs, parser = None, dict(self.kwargs), self._parser()
        functions = [
            Tool.of(object_at(path, f"tools[{number}]"), f"tools[{number}]")
            for number, path in enumerate(self.tools)
        ]
        if self.path:
            target = object_at(self.path, "environment")
            if inspect.isfunction(target) and self.path.partition(":")[0] in ENVIRONMENT_ADAPTERS:
                target, kwargs = target(_parts(self.path)[2], kwargs), {}
            if inspect.isfunction(target) and "row" in inspect.signature(target).parameters:
                return self._agent(target, kwargs, parser)
            cls = _class_of(target, self.path, kwargs)
        if cls is not None and issubclass(cls, EnvironmentAdapter):
            functions += cls.tools
            kwargs = {}
        loaded = Loaded(cls, kwargs, functions, parser)
        names = [tool.name for tool in loaded.tools]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"tools: two tools are called {twice[0]!r}. Rename one.")
        return loaded

    def _parser(self) -> Parser:
        if {*self.tool_call_parser} <= {*FORMS}:
            return partial(parse, forms=self.tool_call_parser)
        path = self.tool_call_parser[0]
        if ":" not in path:
            raise ConfigError(
                f"environment.tool_call_parser={path}: use FILE.py:FUNCTION, or one of "
                f"{', '.join(FORMS)}.{nearest(path, FORMS)}"
            )
        return of_user(object_at(path, "environment.tool_call_parser"))

    def _agent(
        self, function: Callable[..., Any], kwargs: dict[str, Any], parser: Parser
    ) -> Loaded:
        from workers.agents.gateway import check_agent

        if self.tools:
            raise ConfigError(
                f"tools: the agent of environment={self.path} names its tools in its requests. "
                "Leave out tools=[...]."
            )
        check_agent(function, kwargs, str(self.path))
        return Loaded(None, kwargs, [], parser, function, self.endpoint, self.reuses_replies)


@dataclass(frozen=True)
class Loaded:
    """One environment's loaded class (or agent) and functions."""

    cls: type[Any] | None
    kwargs: Mapping[str, Any]
    functions: Sequence[Tool]
    parse: Parser = parse
    agent: Callable[..., Any] | None = None
    """A function that plays a trajectory, instead of a class."""
    endpoint: str = ""
    reuses_replies: bool = False

    def begin(self, seeds: tuple[int, int]) -> Episode | AgentEpisode:
        """Create the environment or agent of one trajectory."""
        if self.agent is None:
            return Episode(self, seeds)
        from workers.agents.gateway import AgentEpisode, AgentSession

        seed_globals(seeds[1])
        rng = np.random.default_rng(seeds[0])
        session = AgentSession(self.parse, self.players, self.reuses_replies)
        return AgentEpisode(self.agent, self.kwargs, rng, session, self.endpoint)

    @property
    def players(self) -> list[str]:
        """Names of the trained players; empty if there is only one player."""
        return list(getattr(self.agent or self.cls, "players", ()))

    @cached_property
    def tools(self) -> list[Tool]:
        """All tools of the policy: the configured functions, and the environment's tools."""
        if self.cls is None:
            return [*self.functions]
        methods = [
            Tool.of(method, "")
            for name, method in inspect.getmembers(self.cls, inspect.isfunction)
            if not name.startswith("_")
            and (name not in NO_TOOLS or name == "step" and _step_is_tool(self.cls))
            and not isinstance(inspect.getattr_static(self.cls, name), staticmethod)
        ]
        return [*self.functions, *methods]

    @cached_property
    def has_step(self) -> bool:
        """True if the class has a `step` that replies to texts."""
        return self.cls is not None and _has_step(self.cls)

    @property
    def is_async(self) -> bool:
        """True if any function or method is a coroutine function."""
        methods = (getattr(self.cls, name, None) for name in NO_TOOLS)
        functions = (tool.function for tool in self.tools)
        return any(map(inspect.iscoroutinefunction, (self.agent, *methods, *functions)))

    @cached_property
    def of_reset(self) -> list[inspect.Parameter]:
        """The parameters of `reset`, read once before processes of trajectories are forked."""
        if self.cls is None:
            return []
        return [*inspect.signature(self.cls.reset).parameters.values()][1:]

    @property
    def columns(self) -> list[str]:
        """Columns of a row that `reset` requires."""
        return [
            parameter.name
            for parameter in self.of_reset
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            and parameter.name not in ("row", "rng")
        ]


def _has_step(cls: type) -> bool:
    """Return True if the class has a `step` that replies to texts."""
    step = getattr(cls, "step", None)
    return step not in (None, Environment.step) and not _step_is_tool(cls)


def _step_is_tool(cls: type) -> bool:
    """Return True if `step` is a tool that returns text, as in environments for TRL."""
    step = getattr(cls, "step", None)
    if step is None or issubclass(cls, Environment):
        return False
    return inspect.signature(step).return_annotation in (str, "str")


def in_full(path: str) -> str:
    """Return a path with an absolute file name, because each process has its own folder."""
    where, name, own_id = _parts(path)
    prefix = path.partition(":")[0]
    if prefix in ENVIRONMENT_ADAPTERS:
        adapter = load_from(where, name, path, path)
        return f"{prefix}:{getattr(adapter, 'id_in_full', str)(own_id)}"
    if not name or not where.endswith(".py"):
        return path
    return ":".join([str(Path(where).expanduser().absolute()), name, *([own_id] * bool(own_id))])


def _parts(path: str) -> tuple[str, str, str]:
    """Split a path into the file or module, the name in it, and the id after the name, or ""."""
    prefix, _, rest = path.partition(":")
    if prefix in ENVIRONMENT_ADAPTERS:
        where, _, name = ENVIRONMENT_ADAPTERS[prefix].partition(":")
        return where, name, rest
    name, _, own_id = rest.partition(":")
    return prefix, name, own_id


def object_at(path: str, key: str) -> Any:
    """Load the object at a path; errors name the setting `key`."""
    where, name, own_id = _parts(path)
    if ":" not in path:
        where, _, name = path.rpartition(".")
    if not where or not name:
        raise ConfigError(
            f"{key}={path}: use FILE.py:NAME, or package.module:NAME."
            f"{nearest(path, ENVIRONMENT_ADAPTERS)}"
        )
    try:
        return load_object(f"{where}:{name}" if own_id else path, key)
    except ConfigError as error:
        hint = "" if ".py" in path else nearest(where, ENVIRONMENT_ADAPTERS)
        raise ConfigError(f"{error}{hint}") from error


def _class_of(cls: Any, path: str, kwargs: Mapping[str, Any]) -> type:
    """Return the environment class at a path; an adapter becomes a subclass with its id."""
    own_id = _parts(path)[2]
    if not isinstance(cls, type) or not callable(getattr(cls, "reset", None)):
        raise ConfigError(
            f"environment={path} is neither an environment nor an agent. Derive a class from "
            "verl_like.Environment with `reset` and `step`, or write a function `agent(row)`."
        )
    if not issubclass(cls, EnvironmentAdapter):
        if own_id:
            raise ConfigError(
                f"environment={path}: {cls.__name__} is not an EnvironmentAdapter. Remove "
                f"':{own_id}'."
            )
        _check_signatures(cls, path, kwargs)
        return cls
    if not own_id:
        raise ConfigError(f"environment={path} needs an id. Use {path}:ID.")
    adapted: type[EnvironmentAdapter] = type(cls.__name__, (cls,), {"id": own_id, "kwargs": kwargs})
    adapted.prepare()
    _check_signatures(adapted, path, {})
    return adapted


def _check_signatures(cls: Any, path: str, kwargs: Mapping[str, Any]) -> None:
    """Reject methods that cannot be called with the expected arguments."""
    try:
        inspect.signature(cls).bind(**kwargs)
    except TypeError as error:
        raise ConfigError(
            f"environment={path}: {cls.__name__} cannot be created with environment.kwargs="
            f"{dict(kwargs)}: {error}. Rows are passed to reset(row, rng), not to the constructor."
        ) from error
    for parameter in [*inspect.signature(cls.reset).parameters.values()][1:]:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"environment={path}: reset is called with keyword arguments, but "
                f"{parameter.name!r} is positional-only. Drop the / from its signature."
            )
    if not _has_step(cls):
        return
    has_players = bool(getattr(cls, "players", ()))
    try:
        inspect.signature(cls.step).bind(None, "text", *["player"] * has_players)
    except TypeError as error:
        takes = "(the policy's text" + ", the player's name" * has_players + ")"
        raise ConfigError(f"environment={path}: step is called with {takes}: {error}.") from error


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
        self._tools = {tool.name: tool.bound_to(self._env) for tool in loaded.tools}
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
            answers = [answer_call(call, self._tools) for call in calls]
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
