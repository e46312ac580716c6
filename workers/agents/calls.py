"""Calls of tools in what a policy says, in the forms that chat models write.

`docs/agents.md` has the table of them. No text raises: what is wrong with a call is said in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Call:
    """A call in what was said: its name and arguments, or what is wrong with it."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    has_texts: bool = False
    """The form has texts alone for arguments: what they are, the tool's schema says."""


def calls_in(text: str) -> list[Call]:
    """The calls in what was said, in their order."""
    for block, read in FORMS.items():
        if blocks := block.findall(text):
            return [call for one in blocks for call in read(one.strip())]
    bare = text.strip().removeprefix("<|python_tag|>").strip()
    if not bare.startswith("{"):
        return []
    call = _of_json(bare)
    return [call] if call.name else []


def _in_tags(text: str) -> list[Call]:
    if "<function=" in text:
        return [
            Call(
                name.strip(), _texts(inner, "<parameter=", ">", "", "</parameter>"), has_texts=True
            )
            for name, inner in _pieces(text, "<function=", ">")
        ]
    name, keys, rest = text.partition("<arg_key>")
    if NAME.fullmatch(name.strip()):
        texts = _texts(keys + rest, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
        return [Call(name.strip(), texts, has_texts=True)]
    return [_of_json(text)]


def _texts(text: str, opening: str, after_name: str, before: str, closing: str) -> dict[str, str]:
    """Arguments whose values stand as they are between `before` and `closing`."""
    found = {}
    for name, rest in _pieces(text, opening, after_name):
        value = rest.partition(before)[2] if before else rest
        found[name] = value.partition(closing)[0].removeprefix("\n").removesuffix("\n")
    return found


def _pieces(text: str, opening: str, after_name: str) -> list[tuple[str, str]]:
    """(name, what follows) behind every opening; one pass, however many there are."""
    halves = [piece.partition(after_name) for piece in text.split(opening)[1:]]
    return [(name, rest) for name, _, rest in halves]


def _of_mistral(text: str) -> list[Call]:
    if found := NAME_AND_JSON.fullmatch(text):
        return [_with_arguments(found[1], found[2])]
    try:
        listed, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        return [Call("", {}, f"the calls are no JSON: {error}")]
    return [_of_object(one) for one in (listed if isinstance(listed, list) else [listed])]


def _of_deepseek(text: str) -> list[Call]:
    name, _, arguments = text.partition("<｜tool▁sep｜>")
    if FENCE in arguments:
        name, _, arguments = arguments.partition(FENCE)
        arguments = arguments.partition("```")[0]
    return [_with_arguments(name.strip(), arguments)]


def _of_json(text: str) -> Call:
    try:
        return _of_object(json.loads(text))
    except (ValueError, RecursionError) as error:
        return Call("", {}, f"the call is no JSON: {error}")


def _of_object(found: Any) -> Call:
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return Call("", {}, 'a call is {"name": ..., "arguments": {...}}')
    return _with_arguments(found["name"], found.get("arguments", found.get("parameters", {})))


def _with_arguments(name: str, arguments: Any) -> Call:
    """Arguments are an object, or its JSON, as OpenAI's clients have them."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return Call(name, {}, f"its arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return Call(name, {}, f"its arguments are {arguments!r:.80}, not an object")
    return Call(name, arguments)


FORMS: dict[re.Pattern[str], Callable[[str], list[Call]]] = {
    re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL): _in_tags,
    re.compile(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|\Z)", re.DOTALL): _of_mistral,
    re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL): _of_deepseek,
}
"""What stands around a call, and how what it holds is read."""
NAME = re.compile(r"[A-Za-z_][\w.-]*")
NAME_AND_JSON = re.compile(
    rf"({NAME.pattern})(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(\{{.*)", re.DOTALL
)
FENCE = "\n```json\n"
