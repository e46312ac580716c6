"""The tokens between two turns are those that the chat template writes there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.agents.templates import AFTER_CALLS, SHAPES, Shape, tokenizer_of
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
"""Leaves the text before a `#` out of older turns, as templates of reasoning models do."""
DROPS = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role == 'user' or loop.last %}"
).replace("or loop.last", "or messages|length < 3")
"""Leaves out older turns."""
TRIMS = CHATML.replace("{{ m.content }}", "{{ 'x' if m.role == 'assistant' else m.content }}")
RAISES = CHATML.replace("{% for m in messages %}", "{% for m in messages %}{{ m.nowhere.x }}")
ONLY_AFTER_CALLS = CHATML.replace(
    "{% for m in messages %}",
    "{% for m in messages if m.role != 'tool' or messages[messages.index(m) - 1].tool_calls %}",
)
"""Writes a tool's result only after a message that has `tool_calls`, in no known form."""
WITHOUT_RESULTS = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}"
)
PARTS = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
ONLY_PARTS = CHATML.replace(
    "{{ m.content }}", "{% for c in m.content if c.type == 'text' %}{{ c.text }}{% endfor %}"
)
"""Leaves out contents that are texts, as the templates of some vision models do."""
TOOL = {"type": "function", "function": {"name": "add", "description": "x", "parameters": {}}}


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
        text_ids = tokenizer("a guess", add_special_tokens=False)["input_ids"]
        observed = {"role": role, "content": f"no. {number}", "name": "add"}
        row += [*text_ids, tokenizer.eos_token_id] + chat.between(
            tokenizer.eos_token_id, [observed]
        )
        messages += [{"role": "assistant", "content": "a guess"}, observed]
    assert row == whole(tokenizer, messages, tools)


@pytest.mark.parametrize("template", [CHATML, ONLY_PARTS])
def test_a_prompt_of_parts_is_rendered_as_its_text(template: str) -> None:
    tokenizer = tokenizer_with(template)
    chat = TurnRenderer(tokenizer, [TOOL], [tokenizer.eos_token_id])
    in_parts = chat.prompt([{"role": "user", "content": PARTS}])
    expected = whole(tokenizer_with(CHATML), [{"role": "user", "content": "a b"}], [TOOL])
    assert in_parts == expected
    between = chat.between(tokenizer.eos_token_id, [{"role": "user", "content": "no"}])
    assert tokenizer.decode(between) == "\n<user>no<eos>\n<assistant>"


@pytest.fixture(params=SHAPES)
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


def test_the_text_between_turns_has_the_templates_separator(shape: Shape) -> None:
    tokenizer = tokenizer_of(shape)
    stop = tokenizer.convert_tokens_to_ids(shape.stops[0])
    chat = TurnRenderer(tokenizer, [], [stop])
    for text in ("no", ""):
        ids = chat.between(stop, [{"role": "user", "content": text}])
        assert tokenizer.decode(ids) == shape.between.replace("no", text)


def test_a_turn_is_appended_or_the_whole_chat_is_rewritten(shape: Shape) -> None:
    """In each of three turns."""
    tokenizer = tokenizer_of(shape)
    stop = tokenizer.convert_tokens_to_ids(shape.stops[0])
    chat = TurnRenderer(tokenizer, [], [stop])
    sampled = [*tokenizer(shape.sampled, add_special_tokens=False)["input_ids"], stop]
    messages: list[Any] = [{"role": "user", "content": "guess"}]
    read = chat.prompt(messages)
    for number in range(3):
        observed = [{"role": "user", "content": f"no. {number}"}]
        turn = chat.turn(sampled, stop, observed)
        rewritten = chat.rewritten(messages, turn, stop)
        appended = read + sampled + chat.between(stop, observed)
        messages += turn
        assert (rewritten is not None) == shape.rewrites
        read = appended if rewritten is None else chat.ids_of([rewritten])[0]
        assert read == whole(tokenizer, messages)


def test_other_ids_of_the_same_text_are_not_rewritten() -> None:
    tokenizer = tokenizer_of(SHAPES["chatml"])
    tokenizer.add_tokens(["gu"])  # "gu" is one id; the policy samples two
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    chat = TurnRenderer(tokenizer, [], [stop])
    sampled = [*tokenizer.convert_tokens_to_ids(["g", "u"]), stop]
    turn = chat.turn(sampled, stop, [{"role": "user", "content": "no"}])
    assert chat.rewritten([{"role": "user", "content": "a"}], turn, stop) is None


def test_every_special_token_of_a_tokenizer_is_escaped(shape: Shape) -> None:
    tokenizer = tokenizer_of(shape)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    text = chat.template.escaped("x".join(shape.special))
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert not {*ids} & {*tokenizer.convert_tokens_to_ids(list(shape.special))}


def test_special_tokens_in_names_and_calls_of_tools_are_text() -> None:
    """A policy can write such a name letter by letter."""
    tokenizer = tokenizer_with(CHATML.replace("'tool: '", "m.name + ': '"))
    chat = TurnRenderer(tokenizer, [TOOL], [tokenizer.eos_token_id])
    ids = chat.between(None, [{"role": "tool", "name": "<eos>", "content": "no"}])
    plain = chat.between(None, [{"role": "tool", "name": "", "content": "no"}])
    assert ids.count(tokenizer.eos_token_id) == plain.count(tokenizer.eos_token_id)
    call = {"function": {"name": "a<eos>", "arguments": {"<eos>": ["<eos>"]}}}
    (safe,) = chat.template.escaped([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert "<eos>" not in str(safe)


@pytest.mark.parametrize(
    ("template", "tools", "words"),
    [
        (None, [], "has no chat template, which defines how turns are written"),
        (DROPS, [], "drops the assistant's message once another turn follows"),
        (TRIMS, [], "changes the text of the assistant's messages"),
        (RAISES, [], "rejects a chat with the roles user, assistant"),
        (
            WITHOUT_RESULTS,
            [TOOL],
            "leaves out the content of a message of the role 'tool', so it would",
        ),
        (
            ONLY_AFTER_CALLS.replace("<eos>", "").replace("{{ m.content }}", "{{ m.content }};"),
            [TOOL],
            "only after a call, and the end of a call is not known",
        ),
        (CHAT_TEMPLATE, [TOOL], "does not write tools into the prompt.*'add'"),
    ],
)
def test_a_template_that_cannot_write_turns_is_rejected(
    template: str | None, tools: list[Any], words: str
) -> None:
    tokenizer = tokenizer_with(template)
    with pytest.raises(ConfigError, match=words):
        TurnRenderer(tokenizer, tools, [tokenizer.eos_token_id])


def test_an_observation_that_the_template_drops_is_rejected() -> None:
    """Without tools only the environment knows that it returns tool messages."""
    tokenizer = tokenizer_with(WITHOUT_RESULTS)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    user, tool = ({"role": role, "content": "no"} for role in ("user", "tool"))
    chat.between(None, [user])
    for observations in ([tool], [user, tool]):
        with pytest.raises(ConfigError, match="role 'tool', so it would be missing from the"):
            chat.between(None, observations)
        with pytest.raises(ConfigError, match="role 'tool'"):
            chat.rewritten([user], chat.turn([], None, observations), None)


def test_each_observation_must_be_in_the_text_between_turns() -> None:
    """A template may drop one text of a role and keep another."""
    template = CHATML.replace("{{ m.content }}", "{{ m.content if m.content != 'no' }}")
    tokenizer = tokenizer_with(template)
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id])
    chat.between(None, [{"role": "user", "content": "yes"}])
    with pytest.raises(ConfigError, match="missing from the sample: 'no'"):
        chat.between(None, [{"role": "user", "content": "no"}])


@pytest.fixture(params=AFTER_CALLS)
def calling_shape(request: pytest.FixtureRequest) -> Shape:
    return AFTER_CALLS[request.param]


def test_a_tools_result_is_in_the_row_if_it_needs_a_call(calling_shape: Shape) -> None:
    tokenizer = tokenizer_of(calling_shape)
    stop, other = tokenizer.convert_tokens_to_ids(list(calling_shape.stops))
    chat = TurnRenderer(tokenizer, [TOOL], [stop, other])
    result = {"role": "tool", "name": "add", "content": "no"}
    assert chat.text_between(stop, [result]) == calling_shape.between
    for last in (None, other):  # a turn that ended in another way gets the end of a call
        assert chat.text_between(last, [result]) == calling_shape.stops[0] + calling_shape.between
    assert chat.text_between(stop, [result, result]).count("no") == 2


def test_a_row_of_calls_has_the_ids_of_the_whole_chat(calling_shape: Shape) -> None:
    """With the sampled history, and with the history that the template writes."""
    tokenizer = tokenizer_of(calling_shape)
    stops = tokenizer.convert_tokens_to_ids(list(calling_shape.stops))
    chat = TurnRenderer(tokenizer, [TOOL], stops)
    sampled = [*tokenizer(calling_shape.sampled, add_special_tokens=False)["input_ids"], stops[0]]
    messages: list[Any] = [{"role": "user", "content": "guess"}]
    row = chat.prompt(messages)
    observed = [{"role": "tool", "name": "add", "content": "no", "tool_call_id": "call00000"}]
    turn = chat.turn(sampled, stops[0], observed)
    assert chat.rewritten(messages, turn, stops[0]) is None
    row += sampled + chat.between(stops[0], observed)
    call = {"name": "add", "arguments": {"a": 1}}
    calls = [{"id": "call00000", "type": "function", "function": call}]
    messages += [{"role": "assistant", "content": "", "tool_calls": calls}, *observed]
    assert row == whole(tokenizer, messages, [TOOL])


def test_a_template_of_no_known_form_writes_a_result_after_a_call() -> None:
    tokenizer = tokenizer_with(ONLY_AFTER_CALLS)
    chat = TurnRenderer(tokenizer, [TOOL], [tokenizer.eos_token_id])
    result = {"role": "tool", "name": "add", "content": "no"}
    text = chat.text_between(tokenizer.eos_token_id, [result])
    assert text == "\n<user>tool: no<eos>\n<assistant>"


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("game", None, [("user", "game")]),
        ("game", "go", [("user", "game\ngo")]),
        ([{"role": "system", "content": "s"}], "go", [("system", "s"), ("user", "go")]),
        ([{"role": "user", "content": "q"}], "go", [("user", "q\ngo")]),
        ([{"role": "user", "content": ""}], "go", [("user", "go")]),
        ([{"role": "user", "content": PARTS}], "go", [("user", "a b\ngo")]),
    ],
)
def test_the_first_observation_ends_the_prompt(
    prompt: Any, text: str | None, expected: list[tuple[str, str]]
) -> None:
    messages = with_observation(prompt, text)
    assert [(message["role"], message["content"]) for message in messages] == expected


ASKED: Any = [{"role": "user", "content": "no"}]
THINKS = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("keeps_reasoning", [True, False])
def test_the_template_gets_the_reasoning_of_older_turns(keeps_reasoning: bool) -> None:
    tokenizer = tokenizer_of(replace(SHAPES["chatml"], template=THINKS))
    chat = TurnRenderer(tokenizer, [], [tokenizer.eos_token_id], keeps_reasoning)
    turn = {"role": "assistant", "content": "no", "reasoning_content": "hm"}
    text = tokenizer.decode(chat.after([], [*ASKED, turn, *ASKED])[0])
    assert ("<think>hm</think>no" in text) == keeps_reasoning
    assert "no<|im_end|>" in text


def test_a_turn_of_channels_is_written_again_by_its_template() -> None:
    """The template of gpt-oss rejects channels in a content, and reads `thinking`."""
    shape = SHAPES["gptoss"]
    template = shape.template.replace(
        "{{ '<|channel|>final",
        "{% if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>"
        "assistant' }}{% endif %}{{ '<|channel|>final",
    )
    tokenizer = tokenizer_of(replace(shape, template=template))
    sampled = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>a"
    )
    stop = tokenizer.convert_tokens_to_ids("<|return|>")
    ids = [*tokenizer(sampled, add_special_tokens=False)["input_ids"], stop]
    for keeps_reasoning in (True, False):
        chat = TurnRenderer(tokenizer, [], [stop], keeps_reasoning)
        turn = chat.turn(ids, stop, ASKED)
        assert turn[0]["content"] == "a"
        text = chat.rewritten(ASKED, turn, stop)
        assert text is not None
        assert ("analysis<|message|>hm" in text) == keeps_reasoning
