"""Load the configured environments: their classes or agents, and their tools.

    spec = EnvironmentSpec("guess.py:Guess", kwargs, tools=["tools.py:add"])
    loaded = spec.load()                # raises a ConfigError for code that cannot be used
    episode = begin(loaded, seeds)      # `workers.agents.process`: one trajectory

This module does not import torch, because every environment's process loads it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError, nearest
from verl_like.process.sandbox import Sandbox
from verl_like.registry import load_attribute, load_object
from workers.agents.calls import FORMS, Parser, parse, user_parser
from workers.agents.environment import (
    ENVIRONMENT_ADAPTERS,
    NO_TOOLS,
    Environment,
    EnvironmentAdapter,
    Tool,
)


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
            Tool.from_function(object_at(path, f"tools[{number}]"), f"tools[{number}]")
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
        if cls is not None:
            _check_signatures(loaded, self.path)
        names = [tool.name for tool in loaded.tools]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
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
        return user_parser(object_at(path, "environment.tool_call_parser"))

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
    listener: int = -1
    """With `endpoint`: the descriptor of the process's listening socket."""

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
            Tool.from_function(method, "")
            for name, method in inspect.getmembers(self.cls, inspect.isfunction)
            if not name.startswith("_")
            and (name not in NO_TOOLS or name == "step" and _step_is_tool(self.cls))
            and not isinstance(inspect.getattr_static(self.cls, name), staticmethod)
        ]
        return [*self.functions, *methods]

    @cached_property
    def has_step(self) -> bool:
        """True if the class has a `step` that replies to texts."""
        step = getattr(self.cls, "step", None)
        return step not in (None, Environment.step) and not _step_is_tool(self.cls)

    @property
    def is_async(self) -> bool:
        """True if any function or method is a coroutine function."""
        methods = (getattr(self.cls, name, None) for name in NO_TOOLS)
        functions = (tool.function for tool in self.tools)
        return any(map(inspect.iscoroutinefunction, (self.agent, *methods, *functions)))

    @cached_property
    def reset_parameters(self) -> list[inspect.Parameter]:
        """The parameters of `reset`, read once before processes of trajectories are forked."""
        if self.cls is None:
            return []
        return [*inspect.signature(self.cls.reset).parameters.values()][1:]

    @property
    def columns(self) -> list[str]:
        """Columns of a row that `reset` requires."""
        return [
            parameter.name
            for parameter in self.reset_parameters
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            and parameter.name not in ("row", "rng")
        ]


def _step_is_tool(cls: Any) -> bool:
    """Return True if `step` is a tool that returns text, as in environments for TRL."""
    step = getattr(cls, "step", None)
    if step is None or issubclass(cls, Environment):
        return False
    return inspect.signature(step).return_annotation in (str, "str")


def full_path(path: str) -> str:
    """Return a path with an absolute file name, because each process has its own folder."""
    where, name, own_id = _parts(path)
    prefix = path.partition(":")[0]
    if prefix in ENVIRONMENT_ADAPTERS:
        adapter = load_attribute(where, name, path, path)
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
        return cls
    if not own_id:
        raise ConfigError(f"environment={path} needs an id. Use {path}:ID.")
    adapted: type[EnvironmentAdapter] = type(cls.__name__, (cls,), {"id": own_id, "kwargs": kwargs})
    adapted.prepare()
    return adapted


def _check_signatures(loaded: Loaded, path: str) -> None:
    """Reject methods that cannot be called with the expected arguments."""
    cls: Any = loaded.cls
    try:
        inspect.signature(cls).bind(**loaded.kwargs)
    except TypeError as error:
        raise ConfigError(
            f"environment={path}: {cls.__name__} cannot be created with environment.kwargs="
            f"{dict(loaded.kwargs)}: {error}. Rows are passed to reset(row, rng), not to the "
            "constructor."
        ) from error
    for parameter in loaded.reset_parameters:
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(
                f"environment={path}: reset is called with keyword arguments, but "
                f"{parameter.name!r} is positional-only. Drop the / from its signature."
            )
    if not loaded.has_step:
        return
    has_players = bool(loaded.players)
    try:
        inspect.signature(cls.step).bind(None, "text", *["player"] * has_players)
    except TypeError as error:
        takes = "(the policy's text" + ", the player's name" * has_players + ")"
        raise ConfigError(f"environment={path}: step is called with {takes}: {error}.") from error
