"""Tools: a function's schema, and results of calls in any text of the policy."""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest

from tests.workers.agents import games
from verl_like.errors import ConfigError
from workers.agents.calls import FORMS, call_like, forms_of, parse
from workers.agents.environment import Tool, answer_call
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.process import Episode

TOOLS = {
    tool.name: tool
    for tool in (Tool.from_function(games.add, "t"), Tool.from_function(games.divide, "t"))
}
HERE = "tests.workers.agents.games"


def results_of(text: str) -> list[tuple[str, bool]]:
    """Return the result of every call in a text, and True if it is an error."""
    return [answer_call(call, TOOLS) for call in parse(text)[0]]


def test_types_and_descriptions_match_transformers_schemas() -> None:
    from transformers.utils import get_json_schema

    def call(a: int, b: float, c: str, d: bool, e: list[int], f: dict[str, int] = {}) -> str:  # noqa: B006
        """Call it.

        It takes a while: wait.

        Args:
            a: The first, over
                two lines, with a colon: here.
            b: b

            c: A color (choices: ["red", "blue"])
            d: d
            e: e (in brackets)
            f: f

        Returns:
            A text.
        """
        return ""

    expected = get_json_schema(call)["function"]
    schema = Tool.from_function(call, "t").schema["function"]
    assert schema["description"] == expected["description"]
    assert schema["parameters"]["required"] == expected["parameters"]["required"]
    assert schema["parameters"]["properties"].keys() == expected["parameters"]["properties"].keys()
    for name, argument in expected["parameters"]["properties"].items():
        for key in ("type", "description", "enum"):
            assert schema["parameters"]["properties"][name].get(key) == argument.get(key)


def test_an_argument_may_be_described_with_its_type() -> None:
    def call(a: int, b: str = "") -> int:
        """Call it.

        Args:
            a (int): The first.
        """
        return a

    schema = Tool.from_function(call, "t").parameters
    assert schema["properties"]["a"] == {"type": "integer", "description": "The first."}
    assert schema["properties"]["b"] == {"type": "string"}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["untyped"], r"tools\[0\]: the argument 'a' has no type"),
        (["silent"], r"tools\[0\] has no docstring"),
        (["odd"], r"tools\[0\]: a has the type <class 'set'>, which JSON does not have"),
        (["nothing"], r"tools\[0\]=.*:nothing: .* has no 'nothing'"),
        (["Count"], r"tools\[0\] is a class, not a function"),
        (["add", "add"], "two tools are called 'add'"),
    ],
)
def test_functions_that_are_no_tools_are_rejected(names: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EnvironmentSpec(tools=[f"{HERE}:{name}" for name in names]).load()


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>', "5"),
        ('thinking\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>', "3"),
        ('{"name": "add", "parameters": {"a": 2}}', "3"),
        ('<|python_tag|>{"name": "add", "arguments": "{\\"a\\": 4}"}', "5"),
        ('<tool_call>{"name": "divide", "arguments": {"a": 1, "b": 2}}', "0.5"),
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n3\n"
            "</parameter>\n</function>\n</tool_call>",
            "5",
        ),
        (
            "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            "3",
        ),
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 2}}]', "3"),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "x"}]', "3"),
        ('[TOOL_CALLS]add[ARGS]{"a": 2}', "3"),
        ('[TOOL_CALLS]add[CALL_ID]x1[ARGS]{"a": 2}', "3"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 2}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "3",
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
            '{"a": 2}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
            "3",
        ),
    ],
)
def test_calls_are_parsed_as_models_write_them(text: str, result: str) -> None:
    assert results_of(text) == [(result, False)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<tool_call>{"name": "ad", "arguments": {}}</tool_call>', "no tool 'ad', only add, div"),
        ('<tool_call>{"name": "add", "arguments": {"c": 1}}</tool_call>', "no argument 'c'; it"),
        ('<tool_call>{"name": "add", "arguments": {}}</tool_call>', "add needs the argument 'a'"),
        ('<tool_call>{"name": "add", "arguments": {"a": "x"}}', "a='x' must be integer"),
        ('<tool_call>{"name": "add", "arguments": {"a": true}}', "a=True must be integer"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "are [1], not an object"),
        ('<tool_call>{"name": "add", "arguments": "{"}</tool_call>', "its arguments are not JSON"),
        (
            "<tool_call>add(1)</tool_call>",
            "the call is not Python: a call has the form name(argument=value",
        ),
        ("<tool_call>[]</tool_call>", 'a call is {"name"'),
        ("<tool_call><function=add><parameter=a>x</parameter>", "a='x' must be integer"),
        ("<tool_call>ad</tool_call>", "no tool 'ad'"),
        ("<tool_call>add</tool_call>", "add needs the argument 'a'"),
        ("[TOOL_CALLS]{1", "the call is not JSON"),
        ('[TOOL_CALLS]add[ARGS]{"a"', "its arguments are not JSON"),
        ("<｜tool▁call▁begin｜>add{", "its arguments are not JSON"),
        ('{"name": "divide", "arguments": {"a": 1, "b": 0}}', "ZeroDivisionError"),
    ],
)
def test_an_invalid_call_gets_an_error_with_the_reason(text: str, words: str) -> None:
    ((result, is_error),) = results_of(text)
    assert result.startswith("error: ")
    assert words in result
    assert is_error


def test_calls_of_one_turn_are_answered_in_order() -> None:
    calls = [{"name": "add", "arguments": {"a": number}} for number in (1, 1, 3)]
    text = "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)
    assert results_of(text) == [("2", False), ("2", False), ("4", False)]
    assert results_of(f"[TOOL_CALLS]{json.dumps(calls)}") == results_of(text)
    named = "".join(f"[TOOL_CALLS]add[ARGS]{json.dumps(call['arguments'])}" for call in calls)
    assert results_of(named) == results_of(text)


def test_text_arguments_become_the_types_of_the_schema() -> None:
    def note(text: str, number: int, several: list[int], either: int | None, any_: Any) -> str:
        """Return the arguments."""
        return repr((text, number, several, either, any_))

    tool = Tool.from_function(note, "t")
    texts = {"text": "1", "number": "2", "several": "[3]", "either": "null", "any_": "4"}
    inner = "".join(f"<parameter={name}>\n{text}\n</parameter>" for name, text in texts.items())
    ((call,), _) = parse(f"<tool_call>\n<function=note>\n{inner}\n</function>\n</tool_call>")
    assert answer_call(call, {"note": tool}) == ("('1', 2, [3], None, '4')", False)


@pytest.mark.parametrize(
    "text", ["5", "", "{", '{"a": 1}', "[1]", '{"name": 3}', '[{"name": "Bob"}]', "[f(x)]", "[]"]
)
def test_other_texts_are_no_calls(text: str) -> None:
    assert parse(text) == ([], text)


A_AND_B = '{"a": 2, "b": 3}'
WRITTEN = {
    "kimi": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0"
    f"<|tool_call_argument_begin|>{A_AND_B}<|tool_call_end|><|tool_calls_section_end|>",
    "harmony": "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    f"{A_AND_B}<|call|>",
    "minimax": '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">2</parameter>\n'
    '<parameter name="b">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "gemma": "<|tool_call>call:add{a:2,b:3}<tool_call|>",
    "function_gemma": "<start_function_call>call:add{a:2,b:3}<end_function_call>",
    "olmo": "<function_calls>\nadd(a=2, b=3)\n</function_calls>",
    "cohere": '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "add", '
    f'"parameters": {A_AND_B}}}\n]<|END_ACTION|>',
    "lfm2": "<|tool_call_start|>[add(a=2, b=3)]<|tool_call_end|>",
    "granite": f'<|tool_call|>[{{"name": "add", "arguments": {A_AND_B}}}]',
    "granite 3.1": f'<tool_call>[{{"name": "add", "arguments": {A_AND_B}}}]',
    "phi4": f'functools[{{"name": "add", "arguments": {A_AND_B}}}]',
    "phi4 mini": f'<|tool_call|>[{{"name": "add", "arguments": {A_AND_B}}}]<|/tool_call|>',
    "xlam": f'```json\n[{{"name": "add", "arguments": {A_AND_B}}}]\n```',
    "granite_20b": f'<function_call> {{"name": "add", "arguments": {A_AND_B}}}',
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "add", "parameters": {A_AND_B}}}'
    "<|action_end|>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">2</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="false">3</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "llama 3, a list": f'[{{"name": "add", "parameters": {A_AND_B}}}]',
    "llama 4": "[add(a=2, b=3)]",
    "llama 4, its tokens": "<|python_start|>[add(a=2, b=3)]<|python_end|>",
}


@pytest.mark.parametrize("model", WRITTEN)
def test_calls_in_the_form_of_every_model_are_parsed(model: str) -> None:
    text = WRITTEN[model]
    assert results_of(text) == [("5", False)]
    if model in FORMS:  # also with text next to it
        assert forms_of(text) == [model]
        calls, rest = parse(f"before {text} after", forms_of(text))
        assert (answer_call(calls[0], TOOLS), rest.split()[0]) == (("5", False), "before")
        assert rest.split()[-1] == "after" or model.startswith("granite")


def test_two_calls_in_one_form_are_parsed() -> None:
    for model in ("kimi", "minimax", "gemma", "olmo", "cohere", "lfm2", "deepseek_v32"):
        assert results_of(WRITTEN[model] * 2) == [("5", False)] * 2, model
    call = '{"name": "add", "parameters": {"a": 2}}'
    for text in (f"{call}; {call}", f"[{call}, {call}]", "[add(a=2), add(a=2)]"):
        assert results_of(text) == [("3", False)] * 2
    assert results_of("<function_calls>add(a=2)\nadd(a=2)</function_calls>") == [("3", False)] * 2


def test_a_code_block_of_calls_may_have_text_next_to_it() -> None:
    for mark, end in (("```json\n", "\n```"), ("functools", ""), ("<|python_tag|>", "")):
        text = f'I add. {mark}[{{"name": "add", "arguments": {A_AND_B}}}]{end}'
        assert (results_of(text), parse(text)[1]) == ([("5", False)], "I add.")
        assert parse(text, ["kimi"])[0] == []
    for text in ('```json\n[{"name": "Bob"}]\n```', "```python\n[f(a=1)]\n```", "I say [f(a=1)]"):
        assert parse(text) == ([], text)


def test_text_between_name_and_arguments_is_skipped() -> None:
    channel = "<|channel|>commentary"
    for between in (f"{channel} json", " code", f"{channel} <|constrain|>json"):
        text = f"<|start|>assistant to=functions.add{between}<|message|>{A_AND_B}"
        assert results_of(text) == [("5", False)], between


def test_values_of_forms_other_than_json_are_parsed() -> None:
    values = {"text": "x, k:{y: ", "nested": {"c": [1, "z"], "d": True}, "none": None}
    gemma = 'f{text:<|"|>x, k:{y: <|"|>,nested:{c:[1,<|"|>z<|"|>],d:true},none:null}'
    ((call,), _) = parse(f"<|tool_call>call:{gemma}<tool_call|>")
    assert call.arguments == values
    ((call,), _) = parse("[f(text='x, k:{y: ', nested={'c': [1, 'z'], 'd': true}, none=null)]")
    assert call.arguments == values


@pytest.mark.parametrize(
    ("first", "second", "closing"),
    [
        ("<function=f><parameter=a>", "<parameter=b>", "</parameter>"),
        ("f<arg_key>a</arg_key><arg_value>", "<arg_key>b</arg_key><arg_value>", "</arg_value>"),
    ],
)
def test_a_closing_tag_in_an_argument_does_not_end_it(
    first: str, second: str, closing: str
) -> None:
    text = f"{first}a {closing} b{closing}\n{second}c{closing}"
    ((call,), _) = parse(f"<tool_call>{text}</tool_call>")
    assert call.arguments == {"a": f"a {closing} b", "b": "c"}


def test_tags_in_a_json_argument_are_text() -> None:
    values = {"text": "<function=g><parameter=a>1</parameter></function> <arg_key>k</arg_key>"}
    call = {"name": "f", "arguments": values}
    ((parsed,), _) = parse(f"<tool_call>{json.dumps(call)}</tool_call>")
    assert (parsed.name, parsed.arguments) == ("f", values)


IN_VALUES = {
    "qwen": "<tool_call>\n<function=f>\n<parameter=text>\n{}\n</parameter>\n<parameter=b>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="text">{}</parameter>\n'
    '<parameter name="b">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "glm": "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>{}</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter '
    'name="text" string="true">{}</｜DSML｜parameter>\n<｜DSML｜parameter name="b" '
    'string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "hermes": '<tool_call>\n{{"name": "f", "arguments": {{"text": {!j}, "b": "3"}}}}\n</tool_call>',
    "mistral": '[TOOL_CALLS]f[ARGS]{{"text": {!j}, "b": "3"}}',
    "kimi": '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{{"text": {!j}, "b": "3"}}'
    "<|tool_call_end|>",
    "harmony": "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    '{{"text": {!j}, "b": "3"}}<|call|>',
    "gemma": '<|tool_call>call:f{{text:<|"|>{}<|"|>,b:<|"|>3<|"|>}}<tool_call|>',
    "olmo": '<function_calls>\nf(text={!j}, b="3")\n</function_calls>',
    "lfm2": '<|tool_call_start|>[f(text={!j}, b="3")]<|tool_call_end|>',
    "llama": '{{"name": "f", "parameters": {{"text": {!j}, "b": "3"}}}}',
}
"""A call as models write it; `{!j}` is a value in JSON's quotes."""
QWEN_IN_A_VALUE = IN_VALUES["qwen"].format("x")


@pytest.mark.parametrize("model", IN_VALUES)
@pytest.mark.parametrize(
    "value",
    [
        "a </think> b",
        "a <think> b",
        "<think>a</think>",
        "a [/THINK] <|END_THINKING|> <channel|> b",
        "a </tool_call> b",
        "</tool_call>",
        "a <tool_call> b",
        "a </function> b",
        "a </invoke></｜DSML｜invoke><|tool_call_end|><|call|><tool_call|></function_calls> b",
        "a <function=g> b",
        "a [TOOL_CALLS] b <|tool_call_begin|> <|tool_call>call: <function_calls>",
        "a </parameter> b </arg_value> c </｜DSML｜parameter> d",
        f"like {QWEN_IN_A_VALUE} here",
        f"</think>{QWEN_IN_A_VALUE}" * 2,
    ],
)
def test_tags_in_a_value_do_not_end_it(model: str, value: str) -> None:
    form = IN_VALUES[model]
    text = form.replace("{!j}", "{}").format(json.dumps(value) if "{!j}" in form else value)
    forms = [model] if model in FORMS else [] if model == "llama" else ["hermes"]
    for before in ("", "<think>maybe</think>", "maybe</think>\n\n"):
        for turn in (before + text, before + text + text):
            if model == "llama" and (before == "maybe</think>\n\n" or turn.count(text) > 1):
                continue  # its calls have no opening
            calls, _ = parse(turn, forms)
            expected = [("f", {"text": value, "b": "3"}, "")] * turn.count(text)
            assert [(call.name, call.arguments, call.problem) for call in calls] == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call><function=f><parameter=text>a </tool_call> b",
        "<tool_call><function=f><parameter=text>a",
        "<tool_call><function=f><parameter=text>a <parameter=b> </tool_call> b</parameter>"
        "</function></tool_call>",
        "<tool_call>f<arg_key>text</arg_key><arg_value>a </tool_call> b",
    ],
)
def test_a_value_without_an_end_is_an_error(text: str) -> None:
    ((call,), _) = parse(text)
    assert call.problem == "its argument 'text' has no end"


def test_a_tag_in_reasoning_does_not_hide_the_call_after_it() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    other = "<tool_call><function=add><parameter=a>2</parameter></function></tool_call>"
    for thought in ("I use <tool_call> now.", '<tool_call>{"a": "', "<tool_call><function=add>"):
        assert results_of(f"{thought}</think>\n{call}") == [("3", False)], thought
        assert results_of(f"<think>{thought}</think>\n{other}") == [("3", False)], thought
    assert results_of(f"<tool_call><function=add><parameter=a> no</think>{other}") == [("3", False)]


def test_calls_in_reasoning_are_ignored() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    assert results_of(f"<think>{call}</think>") == results_of(f"{call}</think>done") == []
    assert results_of(f"<think>{call}") == results_of(f"[THINK]{call}[/THINK]") == []
    assert results_of(f"<think>{call}</think>{call}") == [("3", False)]
    analysis = '<|channel|>analysis<|message|> to=functions.add {"a": 1}<|end|><|start|>assistant'
    assert results_of(f"{analysis}{WRITTEN['harmony']}") == [("5", False)]


def test_the_chat_template_chooses_the_form() -> None:
    hermes = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    both = f"{hermes}{WRITTEN['kimi']}"
    assert [call.arguments for call in parse(both, ["kimi"])[0]] == [{"a": 2, "b": 3}]
    assert [call.arguments for call in parse(both, ["hermes"])[0]] == [{"a": 2}]
    assert parse(hermes, ["kimi"]) == ([], hermes)
    assert call_like(hermes) == "<tool_call"
    assert call_like("<seed:tool_call><f>") == "<seed:tool_call"
    assert not call_like("I call <b>it</b>")


def test_a_users_parser_reads_the_calls(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "def calls(text):\n"
        "    names = [line[1:] for line in text.splitlines() if line.startswith('!')]\n"
        "    return [{'name': name, 'arguments': {'a': 1}} for name in names]\n"
    )
    spec = EnvironmentSpec(tools=[f"{HERE}:add"], tool_call_parser=[f"{file}:calls"])
    episode = Episode(spec.load(), (0, 1))
    episode.reset({})
    assert episode.step("!add\n!ad")["errors"] == 1
    assert episode.step('<tool_call>{"name": "add"}</tool_call>')["call_like"] == "<tool_call"
    with pytest.raises(ConfigError, match="tool_call_parser=hermess: .* Did you mean 'hermes'"):
        EnvironmentSpec(tool_call_parser=["hermess"]).load()


HARMONY = "<|channel|>analysis<|message|>two plus two<|end|><|start|>assistant"


def test_an_environment_gets_no_reasoning_that_special_tokens_enclose() -> None:
    spec = EnvironmentSpec("tests.workers.agents.games:Echo", tools=[f"{HERE}:add"])
    episode = Episode(spec.load(), (0, 1))
    episode.reset({})
    call = f'{HARMONY} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}'
    (answer,) = episode.step(call, hides_thoughts=True)["messages"]
    assert (answer["role"], answer["name"]) == ("tool", "add")
    final = f"{HARMONY}<|channel|>final<|message|>4"
    assert episode.step(final, hides_thoughts=True)["messages"][0]["content"] == "4"
    assert episode.step("<think>a</think>4")["messages"][0]["content"] == "<think>a</think>4"


def test_no_text_raises() -> None:
    parts = ['{"name": "add"', '"arguments"', ":", "{", "}", "[", '"a"', "<tool_call>", "1" * 5000]
    parts += ["</tool_call>", "\ud800", "\\u0000", ",", "null", "[" * 3000, "\n", "true", "1e999"]
    parts += ["[TOOL_CALLS]", "[ARGS]", "add", "<function=add>", "<parameter=a>", "</parameter>"]
    parts += ["<arg_key>a</arg_key>", "<arg_value>", "</arg_value>", "<｜tool▁call▁begin｜>"]
    parts += ["<think>", "</think>", "<function_calls>", "add(", "a=1", ")", "\x00", ";"]
    parts += ["<|tool_call>call:", '<|"|>', "<invoke", ' name="add">', "```json"]
    parts += ["<|tool_call_begin|>functions.add:0"]
    parts += ["<｜tool▁sep｜>", "\n```json\n", "\n```", "NaN", "<｜tool▁call▁end｜>", "</function>"]
    chance = random.Random(0)
    for _ in range(4000):
        for result, _ in results_of("".join(chance.choices(parts, k=chance.randrange(10)))):
            assert isinstance(result, str)


def test_a_text_of_many_openings_is_parsed_in_linear_time() -> None:
    """No pattern backtracks over the text repeatedly."""
    openings = ("<parameter=a>", "<parameter=", "<arg_key>", "\n```json\n", "[CALL_ID]", "a", "{")
    openings += ("<think>", "<tool_call>", '<|"|>', " ", "<", "\nf(a=1)", '{"a":1};', "(")
    starts = ("<tool_call><function=f>", "<tool_call>f<arg_key>", "[TOOL_CALLS]f")
    for opening in openings:
        for start in (*starts, "<|tool_call>call:", "", "[f("):
            began = time.process_time()
            parse(start + opening * 5000)
            call_like(start + opening * 5000)
            assert time.process_time() - began < 2


@pytest.mark.parametrize(
    ("name", "tool", "row", "first", "call", "result", "reward"),
    [
        ("Counter", "increment", {"number": 4}, "start at 4", '{"step": 2}', "6", 6.0),
        ("Judged", "write", {"level": 2}, None, '{"text": "abc"}', "null", 6.0),
        (
            "Rolls",
            "step",
            {},
            f"begin at {random.Random(3).randint(1, 6)}",
            '{"by": 2}',
            "went 2",
            4.0,
        ),
    ],
)
def test_environments_of_trl_are_played_unchanged(
    name: str, tool: str, row: Any, first: str | None, call: str, result: str, reward: float
) -> None:
    """`step` may be a tool; the reward is `reward` or `get_reward`, which is no tool."""
    loaded = EnvironmentSpec(path=f"{HERE}:{name}").load()
    assert [loaded_tool.name for loaded_tool in loaded.tools] == [tool]
    episode = Episode(loaded, (0, 1))
    assert episode.reset({**row, "prompt": "x"}) == {"text": first}
    reply = episode.step(f'<tool_call>{{"name": "{tool}", "arguments": {call}}}</tool_call>')
    assert reply["messages"] == [{"role": "tool", "name": tool, "content": result}]
    assert episode.step("done") == {"end": True, "reward": reward}


def test_functions_and_coroutines_are_tools_without_an_environment() -> None:
    episode = Episode(EnvironmentSpec(tools=[f"{HERE}:add", f"{HERE}:shout"]).load(), (0, 1))
    assert episode.reset({}) == {"text": None}
    reply = episode.step('{"name": "shout", "arguments": {"text": "hi"}}')
    assert (reply["messages"][0]["content"], reply["calls"], reply["errors"]) == ("HI", 1, 0)
    assert episode.step("HI") == {"end": True, "reward": 0.0}
