"""Tools: typed functions whose schemas the policy reads, and the replies to its calls.

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
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

from verl_like.errors import ConfigError, nearest
from workers.agents.calls import ToolCall

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
    def of(function: Any, key: str) -> Tool:
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
