"""Tools: a function's schema, and calls that are answered, whatever the policy writes."""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from typing import Any

import pytest

from tests.workers.agents import games
from verl_like.errors import ConfigError
from workers.agents.environment import EnvironmentSpec, Episode
from workers.agents.tools import Tool, answer_call, calls_in

TOOLS = {tool.name: tool for tool in (Tool.of(games.add, "t"), Tool.of(games.divide, "t"))}
HERE = "tests.workers.agents.games"


def wait(value: Any) -> Any:
    async def awaited() -> Any:
        return await value

    return asyncio.run(awaited()) if inspect.isawaitable(value) else value


def answers(text: str) -> list[tuple[str, bool]]:
    return [answer_call(call, TOOLS, wait) for call in calls_in(text)]


def test_a_typed_function_with_a_docstring_is_a_tool() -> None:
    assert Tool.of(games.add, "tools[0]").schema == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "The sum of two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a"],
            },
        },
    }


def test_types_are_those_of_transformers_schemas() -> None:
    from transformers.utils import get_json_schema

    def call(a: int, b: float, c: str, d: bool, e: list[int], f: dict[str, int]) -> None:
        """Call.

        Args:
            a: a
            b: b
            c: c
            d: d
            e: e
            f: f
        """

    theirs = get_json_schema(call)["function"]["parameters"]["properties"]
    ours = Tool.of(call, "t").parameters["properties"]
    assert {name: one["type"] for name, one in ours.items()} == {
        name: one["type"] for name, one in theirs.items()
    }


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("untyped", r"tools\[0\]: the argument 'a' has no type"),
        ("silent", r"tools\[0\] has no docstring"),
        ("odd", r"tools\[0\]: a has the type <class 'set'>, which JSON has not"),
        ("nothing", r"tools\[0\]='nothing': .* has no such name"),
        ("Count", r"tools\[0\] is no function"),
    ],
)
def test_what_is_no_tool_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EnvironmentSpec(tools=[f"{HERE}:{name}"]).load()


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two are called 'add'"):
        EnvironmentSpec(tools=[f"{HERE}:add", f"{HERE}:add"]).load()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "5"),
        ('thinking\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "3"),
        ('{"name": "add", "parameters": {"a": 2}}', "3"),
        ('<|python_tag|>{"name": "add", "arguments": "{\\"a\\": 4}"}', "5"),
        ('<tool_call>{"name": "divide", "arguments": {"a": 1, "b": 2}}', "0.5"),
    ],
)
def test_a_call_is_read_as_models_write_it(text: str, said: str) -> None:
    assert answers(text) == [(said, False)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<tool_call>{"name": "ad", "arguments": {}}</tool_call>', "no tool 'ad', only add, div"),
        ('<tool_call>{"name": "add", "arguments": {"c": 1}}</tool_call>', "no argument 'c'; it"),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "add needs the argument 'a'"),
        ('<tool_call>{"name": "add", "arguments": {"a": "x"}}</tool_call>', "a='x' is no integer"),
        (
            '<tool_call>{"name": "add", "arguments": {"a": true}}</tool_call>',
            "a=True is no integer",
        ),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are [1], not an object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "its arguments are no JSON"),
        ("<tool_call>add(1)</tool_call>", "the call is no JSON"),
        ("<tool_call>[]</tool_call>", 'a call is {"name"'),
        ('{"name": "divide", "arguments": {"a": 1, "b": 0}}', "ZeroDivisionError"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_by_why(text: str, words: str) -> None:
    ((said, failed),) = answers(text)
    assert said.startswith("error: ")
    assert words in said
    assert failed


def test_calls_of_one_turn_are_answered_in_their_order() -> None:
    calls = [{"name": "add", "arguments": {"a": number}} for number in (1, 1, 3)]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    assert answers(text) == [("2", False), ("2", False), ("4", False)]


@pytest.mark.parametrize("text", ["5", "", "{", '{"a": 1}', "[1]", '{"name": 3}'])
def test_an_answer_that_is_no_call_is_an_answer(text: str) -> None:
    assert calls_in(text) == []


def test_no_text_raises() -> None:
    parts = ['{"name": "add"', '"arguments"', ":", "{", "}", "[", '"a"', "<tool_call>", "1" * 5000]
    parts += ["</tool_call>", "\ud800", "\\u0000", ",", "null", "[" * 3000, "\n", "true", "1e999"]
    chance = random.Random(0)
    for _ in range(2000):
        for said, _ in answers("".join(chance.choices(parts, k=chance.randrange(8)))):
            assert isinstance(said, str)


def test_an_environment_of_trl_plays_as_it_is() -> None:
    loaded = EnvironmentSpec(path=f"{HERE}:Counter").load()
    assert [tool.name for tool in loaded.tools] == ["increment"]
    episode = Episode(loaded, (0, 1))
    assert episode.reset({"number": 4, "prompt": "x"}) == {"text": "start at 4"}
    found = episode.step('<tool_call>{"name": "increment", "arguments": {"step": 2}}</tool_call>')
    assert found["messages"] == [{"role": "tool", "name": "increment", "content": "6"}]
    assert episode.step("done") == {"end": True, "reward": 6.0}


def test_functions_and_coroutines_are_tools_without_an_environment() -> None:
    episode = Episode(EnvironmentSpec(tools=[f"{HERE}:add", f"{HERE}:shout"]).load(), (0, 1))
    assert episode.reset({}) == {"text": None}
    found = episode.step('{"name": "shout", "arguments": {"text": "hi"}}')
    assert (found["messages"][0]["content"], found["calls"], found["errors"]) == ("HI", 1, 0)
    assert episode.step("HI") == {"end": True, "reward": 0.0}
