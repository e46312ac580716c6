"""The tokens between two turns are those that the chat template writes there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.agents.templates import BEHIND_CALLS, SHAPES, Shape, tokenizer_of
from trainer.cli.make_tiny import CHARACTERS, CHAT_TEMPLATE, make_tokenizer
from verl_like.errors import ConfigError
from workers.agents.chat import TurnRenderer, with_observation

CHATML = (
    "{% if tools %}<user>{{ tools|tojson }}<eos>\n{% endif %}"
    "{% for m in messages %}{{ '<' + ('user' if m.role != 'assistant' else m.role) + '>' }}"
    "{{ 'tool: ' if m.role == 'tool' else '' }}{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A turn ends with a token and a newline."""
FORGETS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content.split('#')[-1] if not loop.last and m.role == 'assistant' else m.content }}",
)
"""Leaves out of older turns what stands before a `#`, as reasoning models' templates do."""
DROPS = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role == 'user' or loop.last %}"
).replace("or loop.last", "or messages|length < 3")
"""Leaves out older turns."""
TRIMS = CHATML.replace("{{ m.content }}", "{{ 'x' if m.role == 'assistant' else m.content }}")
REFUSES = CHATML.replace("{% for m in messages %}", "{% for m in messages %}{{ m.nowhere.x }}")
ONLY_BEHIND_CALLS = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages if m.role != 'tool' or messages[messages.index(m) - 1].tool_calls %}",
)
"""Writes a tool's answer only behind a message that has `tool_calls`, in no form that is known."""
WITHOUT_ANSWERS = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
)
TOOL = {"type": "function", "function": {"name": "add", "description": "x", "parameters": {}}}
SAID = "a guess"


def tokenizer_with(template: str | None) -> Any:
    tokenizer = make_tokenizer([*CHARACTERS, '"', "{", "}", ":", "_", "[", "]"])
    tokenizer.chat_template = template
    return tokenizer


def whole(tokenizer: Any, messages: list[dict[str, str]], tools: Any = None) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tools=tools, add_generation_prompt=True, tokenize=False
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_a_row_of_turns_has_the_ids_of_the_whole_chat(role: str, tools: Any) -> None:
    tokenizer = tokenizer_with(CHATML)
    chat = TurnRenderer(tokenizer, tools or [], [tokenizer.eos_token_id])
    messages = [{"role": "user", "content": "guess"}]
    row = chat.prompt(messages)
    for number in range(3):
        drawn = [*tokenizer(SAID, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        observed = {"role": role, "content": f"no. {number}", "name": "add"}
        row += drawn + chat.between(drawn[-1], [observed])
        messages += [{"role": "assistant", "content": SAID}, observed]
    assert row == whole(tokenizer, messages, tools)


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


def test_what_stands_between_two_turns_has_the_templates_separator(shape: Shape) -> None:
    tokenizer = tokenizer_of(shape)
    stop = tokenizer.convert_tokens_to_ids(shape.stops[0])
    chat = TurnRenderer(tokenizer, [], [stop])
    for text in ("no", ""):
        found = chat.between(stop, [{"role": "user", "content": text}])
        assert tokenizer.decode(found) == shape.between.replace("no", text)


def test_a_turn_is_appended_or_the_chat_is_as_the_template_writes_it(shape: Shape) -> None:
    """Over three turns there is never a third result."""
    tokenizer = tokenizer_of(shape)
    stop = tokenizer.convert_tokens_to_ids(shape.stops[0])
    chat = TurnRenderer(tokenizer, [], [stop])
    drawn = [*tokenizer(shape.says, add_special_tokens=False)["input_ids"], stop]
    messages: list[Any] = [{"role": "user", "content": "guess"}]
    read = chat.prompt(messages)
    for number in range(3):
        observed = [{"role": "user", "content": f"no. {number}"}]
        turn = chat.turn(drawn, stop, observed)
        rewritten = chat.rewritten(messages, turn, stop)
        appended = read + drawn + chat.between(stop, observed)
        messages += turn
        assert (rewritten is not None) == shape.rewrites
        read = appended if rewritten is None else chat.ids_of([rewritten])[0]
        assert read == whole(tokenizer, messages)


def test_drawn_ids_that_say_the_same_are_no_rewriting() -> None:
    tokenizer = tokenizer_of(SHAPES["chatml"])
    tokenizer.add_tokens(["gu"])  # "gu" is one id; the policy draws two
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = TurnRenderer(tokenizer, [], [stop])
    drawn = [*tokenizer.convert_tokens_to_ids(["g", "u"]), stop]
    turn = chat.turn(drawn, stop, [{"role": "user", "content": "no"}])
    assert chat.rewritten([{"role": "user", "content": "a"}], turn, stop) is None


def test_every_special_token_of_a_tokenizer_is_escaped(shape: Shape) -> None:
    tokenizer = tokenizer_of(shape)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    text = chat.escaped("x".join(shape.special))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert not {*ids} & {*tokenizer.convert_tokens_to_ids(list(shape.special))}


def test_a_special_token_in_a_tools_name_or_call_is_a_text() -> None:
    """A policy can write such a name letter by letter."""
    tokenizer = tokenizer_with(CHATML.replace("'tool: '", "m.name + ': '"))
    chat = TurnRenderer(tokenizer, [TOOL], [tokenizer.eos_token_id])
    found = chat.between(None, [{"role": "tool", "name": "<eos>", "content": "no"}])
    plain = chat.between(None, [{"role": "tool", "name": "", "content": "no"}])
    assert found.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id)
    call = {"function": {"name": "a<eos>", "arguments": {"<eos>": ["<eos>"]}}}
    (safe,) = chat.safe([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert "<eos>" not in str(safe)


@pytest.mark.parametrize(
    ("template", "tools", "words"),
    [
        (None, [], "has no chat template, which defines how turns are written"),
        (DROPS, [], "drops the assistant's message once another turn follows"),
        (TRIMS, [], "changes the text of the assistant's messages"),
        (REFUSES, [], "rejects a chat with the roles user, assistant"),
        (
            WITHOUT_ANSWERS,
            [TOOL],
            "leaves out the content of a message of the role 'tool', so it would",
        ),
        (CHAT_TEMPLATE, [TOOL], "does not write tools into the prompt.*'add'"),
    ],
)
def test_a_template_that_cannot_take_turns_is_refused(
    template: str | None, tools: list[Any], words: str
) -> None:
    tokenizer = tokenizer_with(template)
    with pytest.raises(ConfigError, match=words):
        TurnRenderer(tokenizer, tools, [tokenizer.eos_token_id])


def test_an_observation_that_the_template_drops_is_rejected_when_it_comes() -> None:
    """Without tools only the environment knows that it returns tool messages."""
    tokenizer = tokenizer_with(WITHOUT_ANSWERS)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    user, tool = ({"role": role, "content": "no"} for role in ("user", "tool"))
    chat.between(None, [user])
    for observations in ([tool], [user, tool]):
        with pytest.raises(ConfigError, match="role 'tool', so it would be missing from the"):
            chat.between(None, observations)
        with pytest.raises(ConfigError, match="role 'tool'"):
            chat.rewritten([user], chat.turn([], None, observations), None)


def test_every_delta_has_its_observation() -> None:
    """A template may drop one text of a role and keep another."""
    template = CHATML.replace("{{ m.content }}", "{{ m.content if m.content != 'no' }}")
    tokenizer = tokenizer_with(template)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    chat.between(None, [{"role": "user", "content": "yes"}])
    with pytest.raises(ConfigError, match="missing from the sample: 'no'"):
        chat.between(None, [{"role": "user", "content": "no"}])


@pytest.fixture(params=BEHIND_CALLS)
def answering(request: pytest.FixtureRequest) -> Shape:
    return BEHIND_CALLS[request.param]


def test_a_tools_answer_is_in_the_row_where_only_a_call_brings_it(answering: Shape) -> None:
    tokenizer = tokenizer_of(answering)
    stop, other = tokenizer.convert_tokens_to_ids(list(answering.stops))
    chat = TurnRenderer(tokenizer, [TOOL], [stop, other])
    answer = {"role": "tool", "name": "add", "content": "no"}
    assert chat.text_between(stop, [answer]) == answering.between
    for last in (None, other):  # a turn that ended in another way gets the end of a call
        assert chat.text_between(last, [answer]) == answering.stops[0] + answering.between
    assert chat.text_between(stop, [answer, answer]).count("no") == 2


def test_a_row_of_calls_has_the_ids_of_the_whole_chat(answering: Shape) -> None:
    """With the sampled history, and with the history that the template writes."""
    tokenizer = tokenizer_of(answering)
    stops = tokenizer.convert_tokens_to_ids(list(answering.stops))
    chat = TurnRenderer(tokenizer, [TOOL], stops)
    drawn = [*tokenizer(answering.says, add_special_tokens=False)["input_ids"], stops[0]]
    messages: list[Any] = [{"role": "user", "content": "guess"}]
    row = chat.prompt(messages)
    observed = [{"role": "tool", "name": "add", "content": "no", "tool_call_id": "call00000"}]
    turn = chat.turn(drawn, stops[0], observed)
    assert chat.rewritten(messages, turn, stops[0]) is None
    row += drawn + chat.between(stops[0], observed)
    call = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": "call00000", "type": "function", "function": call}]
    messages += [{"role": "assistant", "content": "", "tool_calls": calls}, *observed]
    assert row == whole(tokenizer, messages, [TOOL])


def test_a_template_whose_calls_have_no_end_is_rejected() -> None:
    """The tokens between turns would be unknown."""
    template = ONLY_BEHIND_CALLS.replace("<eos>", "").replace("{{ m.content }}", "{{ m.content }};")
    tokenizer = tokenizer_with(template)
    with pytest.raises(ConfigError, match="only after a call, and the end of a call is not known"):
        TurnRenderer(tokenizer, [TOOL], [tokenizer.eos_token_id])


def test_a_template_of_no_known_form_brings_an_answer_behind_a_call() -> None:
    tokenizer = tokenizer_with(ONLY_BEHIND_CALLS)
    chat = TurnRenderer(tokenizer, [TOOL], [tokenizer.eos_token_id])
    answer = {"role": "tool", "name": "add", "content": "no"}
    text = chat.text_between(tokenizer.eos_token_id, [answer])
    assert text == "\n<user>tool: no<eos>\n<assistant>"


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("game", None, [("user", "game")]),
        ("game", "go", [("user", "game\ngo")]),
        ([{"role": "system", "content": "s"}], "go", [("system", "s"), ("user", "go")]),
        ([{"role": "user", "content": "q"}], "go", [("user", "q\ngo")]),
        ([{"role": "user", "content": ""}], "go", [("user", "go")]),
    ],
)
def test_the_first_observation_stands_at_the_end_of_the_prompt(
    prompt: Any, text: str | None, expected: list[tuple[str, str]]
) -> None:
    found = with_observation(prompt, text)
    assert [(one["role"], one["content"]) for one in found] == expected
