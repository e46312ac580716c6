"""Chats with parts become what each chat template writes for their texts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.workers.agents.templates import SHAPES
from trainer.cli.make_tiny import CHARACTERS, make_tokenizer
from workers.chats import render_chat, text_of

PARTS_OF_QWEN_VL = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' or 'image' in c or 'image_url' in c %}<image>"
    "{% elif 'text' in c %}{{ c.text }}{% endif %}{% endfor %}{% endif %}"
)
TEMPLATES = {
    "llama 3": SHAPES["llama3"].template,
    "qwen-vl": "{% for m in messages %}<{{ m.role }}>" + PARTS_OF_QWEN_VL + "{% endfor %}",
    # the system's second part is left out, and each part loses the blanks around it
    "gemma 3": "{% if messages[0].role == 'system' %}{% set m = messages[0] %}"
    "{{ m.content if m.content is string else m.content[0].text }}\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>"
    "{% if m.content is string %}{{ m.content|trim }}{% else %}{% for c in m.content %}"
    "{{ c.text|trim if c.type == 'text' else '<image>' }}{% endfor %}{% endif %}{% endfor %}",
    # a text of the user is left out, and of others, the first part is written
    "llava": "{% for m in messages %}<{{ m.role }}>{% if m.role == 'user' %}"
    "{% for c in m.content|selectattr('type', 'equalto', 'text') %}{{ c.text }}{% endfor %}"
    "{% else %}{{ m.content[0]['text'] + '</s>' }}{% endif %}{% endfor %}",
    # a text is left out
    "idefics": "{% for m in messages %}{{ m.role }}{% if m.content[0]['type'] == 'image' %}:"
    "{% endif %}{% for c in m.content %}{{ c.text if c.type == 'text' }}{% endfor %}{% endfor %}",
}


def part(text: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **others}


def chat(system: Any, user: Any, assistant: Any) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": user},
        {"role": "assistant", "content": assistant},
        {"role": "user", "content": user},
    ]


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    tokenizer = make_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATES[request.param]
    return tokenizer


def test_parts_and_a_text_give_the_same_prompt(tokenizer: Any) -> None:
    texts = render_chat(tokenizer, chat("be brief", "what is it", "a cat"), tokenize=False)
    in_parts = chat([part("be b"), part("rief")], [part("what i"), part("s it")], [part("a cat")])
    assert render_chat(tokenizer, in_parts, tokenize=False) == texts
    for text in ("be brief", "what is it", "a cat"):
        assert text in texts
    assert "type" not in texts


@pytest.mark.parametrize("name", ["qwen-vl", "gemma 3", "idefics"])
def test_a_template_that_reads_parts_gets_them(name: str) -> None:
    tokenizer = make_tokenizer(CHARACTERS)
    tokenizer.chat_template = TEMPLATES[name]
    messages = [{"role": "user", "content": [part("a "), part(" b")]}]
    by_template = tokenizer.apply_chat_template(messages, tokenize=False)
    assert render_chat(tokenizer, messages, tokenize=False) == by_template


def test_keys_that_parquet_fills_with_none_are_absent(tokenizer: Any) -> None:
    absent = {"image": None, "image_url": None}
    messages = chat("s", [part("a", **absent)], [part("b", **absent)])
    expected = render_chat(tokenizer, chat("s", "a", "b"), tokenize=False)
    filled = [{**message, "name": None, "tool_calls": None} for message in messages]
    assert render_chat(tokenizer, filled, tokenize=False) == expected
    tokenizer.chat_template += "{% if 'tool_calls' in messages[0] %}x{% endif %}"
    assert render_chat(tokenizer, filled, tokenize=False) == expected


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ([part("a"), {"type": "image"}], "part 1 of m has the type 'image'; only text is read"),
        (
            [{"type": "image_url", "image_url": {"url": "x"}}],
            "part 0 of m has the type 'image_url'",
        ),
        ([{"image": "x.png"}], "part 0 of m has the type 'image'"),
        ([part("a", image="x.png")], "part 0 of m has the type 'image'"),
        ([{"type": "input_audio", "input_audio": {}}], "has the type 'input_audio'"),
        ([{"type": "video"}], "has the type 'video'"),
        ([{"type": "refusal", "refusal": "no"}], "has the type 'refusal'"),
        (
            [{"type": "text", "text": None}],
            "part 0 of m has no text: {'type': 'text', 'text': None",
        ),
        (["a"], "part 0 of m is 'a', not an object with a type"),
        ({"type": "text", "text": "a"}, "the content of m is {'type': 'text'.*, not a text"),
    ],
)
def test_a_part_that_is_not_a_text_is_named(content: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        text_of(content, "m")


def test_text_parts_of_other_apis_are_joined() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}]
    assert (
        text_of([*parts, {"type": None, "text": "c"}, {"text": "d", "cache_control": {}}]) == "abcd"
    )
