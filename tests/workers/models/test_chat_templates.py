"""Chat templates: limits of time and memory, and values of their variables."""

from __future__ import annotations

import resource
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from verl_like.errors import ConfigError
from workers.models import folder
from workers.models.folder import check_template, set_template_variables

TEMPLATE = (
    "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<no>{% endif %}{{ effort }}"
)
LOOP = "{% for i in range(100000) %}"


def text_of(template: str, **arguments: Any) -> str:
    """Render a message of one letter, as in transformers."""
    messages = [{"role": "user", "content": "a"}]
    rendered: Any = render_jinja_template([messages], chat_template=template, **arguments)
    return str(rendered[0][0])


def tokenizer_with(template: Any) -> Any:
    """Return a tokenizer with the parts that the checks read."""

    def apply(messages: Any, add_generation_prompt: bool, tokenize: bool) -> str:
        assert not tokenize
        return text_of(template, add_generation_prompt=add_generation_prompt)

    return SimpleNamespace(chat_template=template, name_or_path="m", apply_chat_template=apply)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 4000000000 }}",
        "{% set n = namespace(s='a') %}{% for i in range(40) %}"
        "{% set n.s = n.s + n.s %}{% endfor %}",
    ],
)
def test_a_bomb_is_rejected_and_uses_no_memory_of_this_process(
    template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder, "RENDER_MEMORY_BYTES", 2**28)
    monkeypatch.setattr(folder, "RENDER_TIMEOUT_S", 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ConfigError,
        match=r"m: the chat template failed on a message of one letter: it uses more than",
    ):
        check_template(tokenizer_with(template))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB"


def test_a_template_that_never_ends_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "RENDER_TIMEOUT_S", 0.5)
    template = LOOP + LOOP + "{% endfor %}{% endfor %}a"
    with pytest.raises(ConfigError, match=r"of one letter: it wrote no chat within 0\.5 s"):
        check_template(tokenizer_with(template))


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}", "{{ 1 // 0 }}"])
def test_other_templates_are_accepted_while_another_thread_runs(template: str | None) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        check_template(tokenizer_with(template))
    finally:
        stop.set()
        thread.join()


# Variables: `data.apply_chat_template_kwargs` ----------------------------------------------------


def test_a_variable_has_its_value_wherever_the_template_reads_it() -> None:
    tokenizer = tokenizer_with(TEMPLATE)
    assert text_of(tokenizer.chat_template) == "[a]"
    set_template_variables(tokenizer, {"enable_thinking": False, "effort": "it's low"})
    assert text_of(tokenizer.chat_template) == "[a]<no>it's low"


def test_a_line_break_at_the_beginning_stays() -> None:
    tokenizer = tokenizer_with("\n{{ messages[0].content }}{{ effort }}")
    before = text_of(tokenizer.chat_template)
    set_template_variables(tokenizer, {"effort": ""})
    assert text_of(tokenizer.chat_template) == before


def test_every_template_gets_a_variable_and_none_stays_none() -> None:
    tokenizer = tokenizer_with({"default": TEMPLATE, "rag": "{{ effort }}"})
    set_template_variables(tokenizer, {"effort": 3})
    assert text_of(tokenizer.chat_template["rag"]) == "3"
    tokenizer = tokenizer_with(None)
    set_template_variables(tokenizer, {})
    assert tokenizer.chat_template is None


@pytest.mark.parametrize("template", [TEMPLATE, {"default": TEMPLATE}, None])
def test_a_variable_that_no_template_reads_is_rejected(template: Any) -> None:
    with pytest.raises(ConfigError, match="of m does not read 'think'"):
        set_template_variables(tokenizer_with(template), {"think": 1})
