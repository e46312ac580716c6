"""A chat template that takes too long, or too much memory, is rejected before a run."""

from __future__ import annotations

import resource
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from verl_like.errors import ConfigError
from workers.models import tokenizers
from workers.models.tokenizers import check_template

LOOP = "{% for i in range(100000) %}"


def tokenizer_with(template: str | None) -> Any:
    """Return a tokenizer with the parts that the check reads, rendered as in transformers."""

    def apply(messages: Any, add_generation_prompt: bool, tokenize: bool) -> str:
        assert not tokenize
        rendered: Any = render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=add_generation_prompt
        )
        return str(rendered[0][0])

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
    monkeypatch.setattr(tokenizers, "MEMORY", 2**28)
    monkeypatch.setattr(tokenizers, "SECONDS", 100)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(
        ConfigError,
        match=r"m: the chat template failed on a message of one letter: it uses more than",
    ):
        check_template(tokenizer_with(template))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB"


def test_a_template_that_never_ends_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizers, "SECONDS", 0.5)
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
