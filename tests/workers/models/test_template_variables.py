"""`data.apply_chat_template_kwargs`: values of a chat template's variables."""

from __future__ import annotations

from typing import Any

import pytest

from verl_like.errors import ConfigError
from workers.models.tokenizers import set_template_variables

TEMPLATE = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ effort }}"
)


class Tokenizer:
    name_or_path = "folder"

    def __init__(self, template: Any) -> None:
        self.chat_template = template


def text_of(template: str) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered = render_jinja_template(
        conversations=[[{"role": "user", "content": "a"}]], chat_template=template
    )
    return str(rendered[0][0])


def test_a_variable_has_its_value_wherever_the_template_reads_it() -> None:
    tokenizer = Tokenizer(TEMPLATE)
    assert text_of(tokenizer.chat_template) == "[a]"
    set_template_variables(tokenizer, {"enable_thinking": False, "effort": "it's low"})
    assert text_of(tokenizer.chat_template) == "[a]<no>it's low"


def test_a_line_break_at_the_beginning_stays() -> None:
    tokenizer = Tokenizer("\n{{ messages[0].content }}{{ effort }}")
    before = text_of(tokenizer.chat_template)
    set_template_variables(tokenizer, {"effort": ""})
    assert text_of(tokenizer.chat_template) == before


def test_every_template_gets_a_variable_and_none_stays_none() -> None:
    tokenizer = Tokenizer({"default": TEMPLATE, "rag": "{{ effort }}"})
    set_template_variables(tokenizer, {"effort": 3})
    assert text_of(tokenizer.chat_template["rag"]) == "3"
    tokenizer = Tokenizer(None)
    set_template_variables(tokenizer, {})
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("template", [TEMPLATE, {"default": TEMPLATE}, None])
def test_a_variable_that_no_template_reads_is_rejected(template: Any) -> None:
    with pytest.raises(ConfigError, match="of folder does not read 'think'"):
        set_template_variables(Tokenizer(template), {"think": 1})
