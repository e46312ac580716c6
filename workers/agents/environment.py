"""Environments and tools: classes that reply to a policy, and functions that it can call.

An environment is in a separate process:

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

A tool is a typed function, whose schema the policy reads:

    def add(a: int, b: int) -> int:
        '''The sum of two numbers.

        Args:
            a: The first number.
            b: The second number.
        '''
        return a + b

If a call has a problem (`workers.agents.calls`), the reply describes it.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, get_args, get_origin

import numpy as np
import numpy.random  # numpy would load it lazily, and so in every forked process again

from verl_like.errors import ConfigError, nearest
from verl_like.registry import Registry
from workers.agents.calls import ToolCall

IMAGE_MARK = "<image>"
"""The place of an image in an observation's text."""


@dataclass(frozen=True)
class Observation:
    """An environment's reply after which the policy takes another turn.

    Example:

        Observation("Too low. Guess again.", reward=-0.1)

    Args:
        text: the observation that the policy reads next.
        reward: reward of the policy's last text.
        images: paths, bytes or images of PIL, in the places `<image>` of the text, or before it.
    """

    text: str
    reward: float = 0.0
    images: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise TypeError(f"the text of an Observation is {repr_of(self.text)}, not a string")
        if not isinstance(self.images, list | tuple):
            raise TypeError(f"the images of an Observation are {repr_of(self.images)}, not a list")
        finite_reward(self.reward)
        _ = self.content  # an error is raised here, in the environment's code

    @cached_property
    def content(self) -> str | list[dict[str, str]]:
        """The content of a message: the text, or parts of text and images as `data:` URLs."""
        if not self.images:
            return self.text
        from workers.images import image_url

        texts = self.text.split(IMAGE_MARK)
        if len(texts) == 1:
            texts = ["" for _ in self.images] + texts
        if len(texts) - 1 != len(self.images):
            raise ValueError(
                f"an Observation has {len(self.images)} images, and {len(texts) - 1} places for "
                f"them ({IMAGE_MARK}) in its text"
            )
        parts = [{"type": "text", "text": texts[0]}]
        for image, text in zip(self.images, texts[1:], strict=True):
            parts += [{"type": "image", "url": image_url(image)}, {"type": "text", "text": text}]
        return [part for part in parts if part.get("text") != ""]


@dataclass(frozen=True)
class TrajectoryEnd:
    """An environment's reply that ends the trajectory.

    Example:

        TrajectoryEnd(reward=1.0)                   # solved
        TrajectoryEnd(reward=0.0, truncated=True)   # out of time

    Args:
        reward: reward of the policy's last text.
        truncated: True if a limit, not the task, ended it; counts like `environment.max_turns`.
    """

    reward: float = 0.0
    truncated: bool = False

    def __post_init__(self) -> None:
        finite_reward(self.reward)


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

    def reset(self, row: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Start a trajectory; return the first observation, or None to add nothing to the prompt.

        It is a text, or an `Observation` if it has images. With several players, return a dict that
        maps players to their first observations. These players take the first turns. Parameters
        with names of columns get the row's values.

        Args:
            row: the row of the data, with all its columns.
            *args: type checkers then accept the parameters of your own `reset`. A parameter `rng`
                gets a `numpy.random.Generator` with the same seed for all samples of a prompt.
        """
        return None

    def step(self, text: str, *args: Any, **kwargs: Any) -> Any:
        """Reply to the policy's text with an `Observation` or a `TrajectoryEnd`.

        With several players, define `step(self, text, player)`, and return a dict that maps players
        to their replies. A player that gets an `Observation` takes its next turn.

        Args:
            text: the text that the policy has generated in this turn.
            *args: the name of the player, if there are several.
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


ENVIRONMENT_ADAPTERS: Registry[str] = Registry(
    "adapter of environments",
    entry="path of an EnvironmentAdapter, or of (id, kwargs) -> agent",
)
"""Prefixes for `environment`, such as `gymnasium` in `gymnasium:CartPole-v1`.

    ENVIRONMENT_ADAPTERS.register("mygym")("my_package.adapters:MyGym")     # environment=mygym:task

Entries are strings, so that a registration imports nothing.
"""
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


def finite_reward(reward: Any) -> float:
    """Return a reward as a float; reject a value that is not a finite number."""
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


def repr_of(value: Any) -> str:
    """Return the type and the value, for error messages."""
    return f"{type(value).__name__} {value!r:.80}"


NO_TOOLS = {"reset", "step", "get_reward"}
"""Public methods of an environment that the policy cannot call, except a `step` that is a tool."""
WHICH_METHODS = (
    "An environment's tools are its methods other than reset, step, get_reward and _names."
)
LONGEST_ANSWER = 100_000
"""Maximum characters of a tool's reply; the rest is cut off."""
TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", dict: "object"}
ACCEPTS: dict[str, Any] = {name: kind for kind, name in TYPES.items()} | {"number": (int, float)}


@dataclass(frozen=True)
class Tool:
    """A function that a policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments."""
    function: Callable[..., Any]
    is_method: bool = False

    @staticmethod
    def from_function(function: Any, key: str) -> Tool:
        """Make a tool of a typed function with a docstring; errors name the setting `key`."""
        name = getattr(function, "__name__", str(function))
        where = key or f"environment: the tool {name}"
        rule = "" if key else f"{nearest(name, NO_TOOLS)} {WHICH_METHODS}"
        if not callable(function) or isinstance(function, type):
            kind = "a class" if isinstance(function, type) else f"{function!r:.60}"
            raise ConfigError(
                f"{where} is {kind}, not a function. Use a function with type hints and a "
                "docstring."
            )
        docstring = inspect.getdoc(function)
        if not docstring:
            raise ConfigError(
                f"{where} has no docstring. Add one: the policy reads it to learn what the "
                f"tool does.{rule}"
            )
        hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
        description, described = read_docstring(docstring, list(parameters))
        properties, required = {}, []
        for name, parameter in parameters.items():
            if not key and name == "self":
                continue
            if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                raise ConfigError(
                    f"{where}: a policy cannot pass the {parameter.kind.description} argument "
                    f"{name!r}. Use named arguments."
                )
            if name not in hints:
                raise ConfigError(
                    f"{where}: the argument {name!r} has no type hint. Add one.{rule}"
                )
            schema = _schema(hints[name], f"{where}: {name}")
            properties[name] = schema | described.get(name, {})
            if parameter.default is parameter.empty:
                required.append(name)
        arguments = {"type": "object", "properties": properties, "required": required}
        return Tool(function.__name__, description, arguments, function, is_method=not key)

    @property
    def schema(self) -> dict[str, Any]:
        """The tool's schema for chat templates."""
        function = {"name": self.name, "description": self.description}
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}

    def typed(self, texts: Mapping[str, str]) -> dict[str, Any]:
        """Convert text arguments to the types in the schema."""
        properties = self.parameters.get("properties", {})
        values: dict[str, Any] = dict(texts)
        for name, text in texts.items():
            if not fits(text, properties.get(name, {})):
                with suppress(ValueError, RecursionError):
                    values[name] = json.loads(text)
        return values

    def problem_with(self, arguments: Mapping[str, Any]) -> str:
        """Return why the tool cannot be called with these arguments; "" if it can."""
        properties = self.parameters.get("properties", {})
        takes = (
            ", ".join(f"{name}: {describe_type(part)}" for name, part in properties.items())
            or "nothing"
        )
        for name in arguments:
            if name not in properties:
                return f"{self.name} has no argument {name!r}; it accepts {takes}"
        for name in self.parameters.get("required", ()):
            if name not in arguments:
                return f"{self.name} needs the argument {name!r}; it accepts {takes}"
        for name, value in arguments.items():
            if not fits(value, properties[name]):
                return (
                    f"{self.name}: {name}={value!r:.80} must be {describe_type(properties[name])}"
                )
        return ""


def read_docstring(text: str, names: Sequence[str]) -> tuple[str, dict[str, dict[str, Any]]]:
    """Return a function's description, and what `Args:` adds to the schemas of its parameters.

    It works like `transformers.utils.get_json_schema`, which would import torch into the processes
    of environments. `(choices: ["a", "b"])` at the end of a description becomes an `enum`.
    """
    description, *parts = re.split(r"^(Args|Returns|Raises):", text, flags=re.MULTILINE)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    _, *parts = re.split(
        rf"^\s*({'|'.join(map(re.escape, names)) or '$^'})(?: ?\([^()\n]*\))?:",
        sections.get("Args", ""),
        flags=re.MULTILINE,
    )
    described: dict[str, dict[str, Any]] = {}
    for name, part in zip(parts[::2], parts[1::2], strict=True):
        words = " ".join(part.split())
        choices = re.fullmatch(r"(.*?)\s*\(choices:\s*(\[.*\])\s*\)", words, re.IGNORECASE)
        with suppress(ValueError):
            if choices:
                described[name] = {"enum": json.loads(choices[2])}
                words = choices[1]
        described.setdefault(name, {})["description"] = words
    return description.strip(), described


def _schema(kind: Any, where: str) -> dict[str, Any]:
    """Return the JSON schema of a Python type."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind in TYPES:
        return {"type": TYPES[kind]}
    if origin in (list, tuple) or kind is list:
        return {"type": "array", "items": _schema(inner[0], where) if inner else {}}
    if origin is dict:
        return {"type": "object"}
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(part, where) for part in inner]}
    if kind is type(None):
        return {"type": "null"}
    if kind is Any:
        return {}
    raise ConfigError(
        f"{where} has the type {kind}, which JSON does not have. Use int, float, str, bool, dict, "
        "list, None, Literal, or a union of these."
    )


def describe_type(schema: Mapping[str, Any]) -> str:
    """Return a schema's type as text."""
    if "enum" in schema:
        return f"one of {schema['enum']}"
    if "anyOf" in schema:
        return " or ".join(map(describe_type, schema["anyOf"]))
    kind = str(schema.get("type", "value"))
    return f"array of {describe_type(schema['items'])}" if "items" in schema else kind


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return True if a value has the type that a schema names; unknown types always fit."""
    if "enum" in schema:
        return value in schema["enum"]
    if "anyOf" in schema:
        return any(fits(value, part) for part in schema["anyOf"])
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items", {})
        return isinstance(value, list) and all(fits(element, items) for element in value)
    if kind == "null":
        return value is None
    if not isinstance(kind, str) or kind not in ACCEPTS:
        return True
    return isinstance(value, ACCEPTS[kind]) and (kind == "boolean") == isinstance(value, bool)


def waited(value: Any) -> Any:
    """Return a value; if it is an awaitable, wait for its result."""
    if not hasattr(value, "__await__"):  # without `inspect`, whose ABC caches each fork would copy
        return value
    import asyncio  # imports a hundred modules, whose memory pages each fork would copy

    return asyncio.run(_awaited(value))


async def _awaited(value: Any) -> Any:
    return await value


def answer_call(
    call: ToolCall, tools: Mapping[str, Tool], environment: Any = None
) -> tuple[str, bool]:
    """Return the reply to a call, and True if it is an error; methods are of the environment."""
    if call.problem:
        return f"error: {call.problem}", True
    tool = tools.get(call.name)
    if tool is None:
        problem = f"there is no tool {call.name!r}, only {', '.join(tools)}."
        return f"error: {problem}{nearest(call.name, tools)}", True
    arguments = tool.typed(call.arguments) if call.has_texts else call.arguments
    problem = tool.problem_with(arguments)
    if problem:
        return f"error: {problem}", True
    try:
        if tool.is_method:
            answer = waited(tool.function(environment, **arguments))
        else:
            answer = waited(tool.function(**arguments))
        text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
    except Exception as error:  # noqa: BLE001 - a user's tool may raise anything
        return f"error: {type(error).__name__}: {error}"[:LONGEST_ANSWER], True
    return text[:LONGEST_ANSWER], False
