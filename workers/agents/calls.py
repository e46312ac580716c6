"""Parse tool calls in a policy's text, in the formats of chat models.

    calls, text = parse(text, forms_of(chat_template))

`docs/agents.md` lists the models that use each format. Parsing never raises: a call that cannot be
parsed has a `problem`.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from workers.thoughts import THOUGHTS


@dataclass(frozen=True)
class ToolCall:
    """A parsed call: its name and arguments, or the problem with it."""

    name: str
    arguments: Mapping[str, Any]
    problem: str = ""
    has_texts: bool = False
    """True if all arguments are texts in this format; the tool's schema says how to convert them.
    """


Parser = Callable[[str], tuple[list[ToolCall], str]]
"""A function that returns the calls in a text, in order, and the rest of the text."""


@dataclass(frozen=True)
class Form:
    """A format of calls: the strings around a call."""

    opening: str
    closing: str = ""
    """If "" or not in the text, the call ends where the next call begins, or with the text."""
    mark: str = ""
    """If a chat template contains this string, it uses this format; by default the opening."""


FORMS = {
    "hermes": Form("<tool_call>", "</tool_call>"),
    "mistral": Form("[TOOL_CALLS]"),
    "deepseek": Form("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    "deepseek_v32": Form("<｜DSML｜invoke", "</｜DSML｜invoke>"),
    "minimax": Form("<invoke", "</invoke>"),
    "kimi": Form("<|tool_call_begin|>", "<|tool_call_end|>"),
    "harmony": Form(" to=functions.", "<|call|>", mark="<|call|>"),
    "gemma": Form("<|tool_call>call:", "<tool_call|>"),
    "function_gemma": Form("<start_function_call>call:", "<end_function_call>"),
    "lfm2": Form("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo": Form("<function_calls>", "</function_calls>"),
    "cohere": Form("<|START_ACTION|>", "<|END_ACTION|>"),
    "granite": Form("<|tool_call|>", "<|/tool_call|>"),
    "granite_20b": Form("<function_call>"),
    "internlm": Form("<|action_start|><|plugin|>", "<|action_end|>", mark="<|action_start|>"),
}
"""The formats by name, for `environment.tool_call_parser`."""
OPENED = re.compile(
    "|".join(rf"{re.escape(a)}.*?(?:{re.escape(b)}|\Z)" for a, b in THOUGHTS.items()), re.DOTALL
)
"""Matches reasoning with its opening."""
IS_LIKE_A_CALL = re.compile(
    r"<[^<>\s]*(?:tool|function)[_▁]?calls?\b|<(?:function|invoke)\b|\"(?:arguments|parameters)\"\s*:",
    re.IGNORECASE,
)
BARE = re.compile(r"(?:^|<\|python_(?:tag|start)\|>|functools|```(?:json)?)\s*(?=[\[{])")
"""Matches where a call without an opening may begin."""
AROUND_CALLS = re.compile(
    r"</?(?:minimax:tool_call|｜DSML｜function_calls|\|tool_calls_section_(?:begin|end)\|"
    r"|｜tool▁calls▁(?:begin|end)｜)>"
)
"""Tags around all calls of a turn."""
ARGUMENTS = {"arguments", "parameters"}
NAME = r"[A-Za-z_][\w.-]*"
NAME_AND_JSON = re.compile(
    rf"(?:functions\.|function<｜tool▁sep｜>(?=\w))?({NAME})(?::\d+)?"
    r"(?:<[^<>]*>|\[[^\[\]]*\]\w*|```json|\s)*(\{.*)",
    re.DOTALL,
)
"""Matches a name, separators, and JSON arguments."""
TAG = re.compile(
    r'<function=(?P<function>[^<>]*)>|\A\s*name="(?P<invoked>[^"<>]*)"\s*>'
    r'|<(?:｜DSML｜)?parameter(?:=|\s+name=")(?P<parameter>[^<>"]*)[^<>]*>'
    r"|<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"
    r"|</(?:(?:｜DSML｜)?parameter|arg_value)>(?P<is_last>(?=\s*(?:\Z|</function>|<function=|"
    r"<(?:｜DSML｜)?parameter[=\s]|<arg_key>)))?"
)
"""Matches the tags of a call whose arguments stand between tags: its name, and around its values.

A closing tag has a group `is_last` if the text after it continues the call.
"""
MAX_ENDS = 1000
"""Maximum number of closing tags of a text that are tried as the end of a call."""
GEMMA = re.compile(rf'<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>|([{{,]\s*)({NAME})\s*:', re.DOTALL)
"""Matches strings in Gemma's quotes, and keys without quotes."""


def forms_of(template: str) -> list[str]:
    """Return the formats that a chat template uses; none if it shows no known format."""
    return [name for name, form in FORMS.items() if (form.mark or form.opening) in template]


def parse(text: str, forms: Collection[str] = ()) -> tuple[list[ToolCall], str]:
    """Return the calls in a text, and the rest of the text.

    Of the formats in `forms` (if empty, of all), the first one in `FORMS` that occurs in the text
    is used. A text that consists only of JSON or Python calls needs no opening. If all formats are
    allowed, the text may also end with JSON calls, or contain them in a code block.
    """
    thought = OPENED.match(text.lstrip())
    calls, rest = _bare(text.lstrip()[thought.end() if thought else 0 :].strip(), is_whole=True)
    if calls:  # an argument may contain any tag
        return calls, rest
    for name in FORMS:
        blocks = _blocks(text, name) if not forms or name in forms else []
        if blocks:
            begins = [0, *(end for _, end, _ in blocks)]
            ends = [*(begin for begin, _, _ in blocks), len(text)]
            rest = "".join(text[begin:end] for begin, end in zip(begins, ends, strict=True))
            calls = [call for _, _, calls in blocks for call in calls]
            return calls, AROUND_CALLS.sub("", rest).strip()
    return _bare(_without_thoughts(text).strip(), is_whole=bool(forms))


def call_like(text: str) -> str:
    """Return a tag or JSON key in the text that looks like a part of a call, or ""."""
    match = IS_LIKE_A_CALL.search(_without_thoughts(text))
    return match[0] if match else ""


def user_parser(function: Callable[[str], Sequence[Mapping[str, Any]]]) -> Parser:
    """Make a parser of a function that returns a list of {"name": ..., "arguments": ...}."""
    return lambda text: ([_call_from_object(call) for call in function(text)], "")


def _blocks(text: str, name: str) -> list[tuple[int, int, list[ToolCall]]]:
    """Return begin, end and calls of every block of a format, outside the reasoning of a text.

    A tag in the value of an argument is text: a block ends at the first tag with which its calls
    can be read, or at the first tag if there is none.
    """
    form = FORMS[name]
    tags = [form.opening, *THOUGHTS, *THOUGHTS.values()]
    starts = re.compile("|".join(map(re.escape, tags)))
    closings = [form.closing] if form.closing else []
    closed = "|".join(map(re.escape, [*closings, *THOUGHTS.values()]))
    ends = re.compile(rf"{closed}|(?={re.escape(form.opening)})|\Z")
    blocks: list[tuple[int, int, list[ToolCall]]] = []
    at, num_tried = 0, 0
    while start := starts.search(text, at):
        at = start.end()
        if start[0] in THOUGHTS:
            _, closing, rest = text[at:].partition(THOUGHTS[start[0]])
            at = len(text) - len(rest)
            continue
        if start[0] != form.opening:  # the end of reasoning that the prompt has opened
            blocks.clear()
            continue
        tried: list[tuple[re.Match[str], list[ToolCall]]] = []
        for end in ends.finditer(text, at):
            tried.append((end, _read(text[at : end.start()].strip(), name)))
            num_tried += 1
            if num_tried > MAX_ENDS or not any(call.problem for call in tried[-1][1]):
                break
        end, calls = tried[0] if any(call.problem for call in tried[-1][1]) else tried[-1]
        at = end.end()
        if end[0] in THOUGHTS.values():
            blocks.clear()
        else:
            blocks.append((start.start(), at, calls))
    return blocks


def _without_thoughts(text: str) -> str:
    """Replace the reasoning in a text with spaces; the prompt may already have opened it."""
    text = OPENED.sub(lambda thought: " " * len(thought[0]), text)
    for closing in THOUGHTS.values():
        thought, closed, rest = text.rpartition(closing)
        text = " " * len(thought + closed) + rest
    return text


def _bare(text: str, is_whole: bool) -> tuple[list[ToolCall], str]:
    """Return calls without an opening, and the rest of the text.

    With `is_whole`, they must be the whole text. Otherwise JSON calls may also end it or be in a
    code block.
    """
    match = BARE.search(text)
    if match is None:
        return [], text
    before, bare = text[: match.start()], text[match.end() :].removesuffix("<|python_end|>")
    calls, rest = [], ""
    if re.match(rf"\[\s*{NAME}\(", bare):
        calls = _pythonic(bare) if not before else []
    else:
        with suppress(ValueError, RecursionError):
            objects, rest = _objects(bare)
            if all(isinstance(value, dict) and ARGUMENTS & {*value} for value in objects):
                calls = [_call_from_object(value) for value in objects]
    outside = f"{before}{rest.removeprefix('```')}".strip()
    is_closed = not rest or rest.startswith("```")
    if not is_closed or is_whole and outside or not all(call.name for call in calls):
        calls = []
    return (calls, outside) if calls else ([], text)


def _read(text: str, form: str) -> list[ToolCall]:
    """Return the calls in the text between an opening and its closing."""
    if "gemma" in form:
        text = GEMMA.sub(_as_json, text)
    if form == "harmony":  # between name and arguments are the message's channel and type
        header, _, arguments = text.partition("<|message|>")
        text = re.split(r"[^\w.-]", header, maxsplit=1)[0] + arguments.strip()
    if re.match(rf'<|name="|{NAME}\s*(?:<arg_key>|\Z)', text):
        calls = _tagged(text)
        if calls:
            return calls
    match = NAME_AND_JSON.fullmatch(text)
    if match:
        return [_with_arguments(match[1], match[2].strip().removesuffix("```"))]
    if re.match(rf"\[?\s*{NAME}\(", text):
        return _pythonic(text)
    try:
        return [_call_from_object(value) for value in _objects(text)[0] or [None]]
    except (ValueError, RecursionError) as error:
        return [ToolCall("", {}, f"the call is not JSON: {error}")]


def _objects(text: str) -> tuple[list[Any], str]:
    """Return the JSON values at the start of a text, with lists flattened, and the rest of it.

    Spaces or ";" may separate the values.
    """
    objects: list[Any] = []
    is_first = True
    while is_first or text.startswith(("{", "[")):
        value, end = json.JSONDecoder().raw_decode(text)
        objects += value if isinstance(value, list) else [value]
        text, is_first = text[end:].lstrip("; \n\t"), False
    return objects, text


def _pythonic(text: str) -> list[ToolCall]:
    """Parse calls in Python syntax, in a list or one per line."""
    try:
        lines = [getattr(line, "value", None) for line in ast.parse(text).body]
        calls = []
        for node in (node for line in lines for node in getattr(line, "elts", [line])):
            if (
                not isinstance(node, ast.Call)
                or node.args
                or any(w.arg is None for w in node.keywords)
            ):
                raise ValueError("a call has the form name(argument=value, ...)")
            values = {
                str(word.arg): ast.literal_eval(_JsonWords().visit(word.value))
                for word in node.keywords
            }
            calls.append(ToolCall(ast.unparse(node.func), values))
        return calls
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return [ToolCall("", {}, f"the call is not Python: {error}")]


class _JsonWords(ast.NodeTransformer):
    """Replaces the names true, false and null with Python's constants."""

    def visit_Name(self, node: ast.Name) -> ast.expr:  # noqa: N802 - name in the base class
        words = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _tagged(text: str) -> list[ToolCall]:
    """Parse calls whose arguments stand between tags.

    Tags in a value are text if each opening tag among them has its closing tag.
    """
    name = text.partition("<arg_key>")[0].strip()
    calls: list[tuple[str, dict[str, str]]] = [(name, {})] if re.fullmatch(NAME, name) else []
    key, begin, depth = "", 0, 0
    for tag in TAG.finditer(text):
        names = tag.groupdict()
        name, opened = names["function"] or names["invoked"], names["parameter"] or names["key"]
        if opened is not None:
            key, begin = (key, begin) if depth else (opened, tag.end())
            depth += 1
        elif name is not None:
            calls += [] if depth else [(name.strip(), {})]
        elif depth > 1 or depth and names["is_last"] is not None:
            depth -= 1
            if not depth and calls:
                value = text[begin : tag.start()]
                calls[-1][1][key] = value.removeprefix("\n").removesuffix("\n")
    problems = [""] * len(calls)
    if depth and calls:
        problems[-1] = f"its argument {key!r:.80} has no end"
    return [
        ToolCall(name, texts, problem, has_texts=True)
        for (name, texts), problem in zip(calls, problems, strict=True)
    ]


def _as_json(part: re.Match[str]) -> str:
    if part[4]:
        return f"{part[3]}{json.dumps(part[4])}:"
    return json.dumps(part[1] if part[1] is not None else part[2])


def _call_from_object(value: Any) -> ToolCall:
    name = value.get("name", value.get("tool_name")) if isinstance(value, Mapping) else None
    if not isinstance(name, str):
        return ToolCall("", {}, 'a call is {"name": ..., "arguments": {...}}')
    return _with_arguments(name, value.get("arguments", value.get("parameters", {})))


def _with_arguments(name: str, arguments: Any) -> ToolCall:
    """Return a call; `arguments` is an object, or its JSON as in OpenAI's API."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, {}, f"its arguments are not JSON: {error}")
    if not isinstance(arguments, dict):
        return ToolCall(name, {}, f"its arguments are {arguments!r:.80}, not an object")
    return ToolCall(name, arguments)
