"""Chat templates of strangers make no more than they may, in no more time, in any rendering."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
from jinja2 import UndefinedError
from transformers.utils import chat_template_utils

from workers.models import chat_templates
from workers.models.chat_templates import TooMuchError, bound_templates

MESSAGES = [{"role": "user", "content": "a % b {c}"}, {"role": "assistant", "content": "d"}]


def rendered(template: str, messages: Any = MESSAGES) -> str:
    bound_templates()
    compiled = chat_template_utils._cached_compile_jinja_template(template)
    text: str = compiled.render(messages=messages, add_generation_prompt=True, tools=None)
    return text


LOOP = "{% for i in range(100000) %}"
BOMBS = {
    "of letters": "{{ 'a' * 4000000000 }}",
    "the other way round": "{{ 4000000000 * 'a' }}",
    "of a list": "{{ ([0] * 4000000000)|length }}",
    "of doubled texts": "{% set n = namespace(s='a') %}{% for i in range(40) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "of doubled texts by ~": "{% set n = namespace(s='a') %}{% for i in range(40) %}"
    "{% set n.s = n.s ~ n.s %}{% endfor %}",
    "of doubled lists": "{% set n = namespace(s=[1]) %}{% for i in range(40) %}"
    "{% set n.s = n.s + n.s %}{% endfor %}",
    "of kept texts": "{% set n = namespace(s=[]) %}"
    + LOOP
    + "{% set n.s = n.s + ['a' * 1000000] %}"
    "{% endfor %}",
    "of squares": "{% set n = namespace(s=9) %}{% for i in range(60) %}"
    "{% set n.s = n.s * n.s %}{% endfor %}",
    "of a power": "{{ 10 ** (10 ** 10) }}",
    "of width": "{{ 'a'.center(4000000000) }}",
    "of a filter's width": "{{ 'a'|center(4000000000) }}",
    "of a mapped filter": "{{ ['a']|map('center', 4000000000)|list }}",
    "of indents": "{{ ('\\n' * 1000000)|indent(10000) }}",
    "of an indent as text": "{{ ('\\n' * 1000000)|indent('a' * 1000000) }}",
    "of JSON": "{{ messages|tojson(indent=4000000000) }}",
    "of %": "{{ '%4000000000d' % 1 }}",
    "of %*": "{{ '%*d' % (4000000000, 1) }}",
    "of the filter format": "{{ '%4000000000d'|format(1) }}",
    "of the method format": "{{ '{:>4000000000}'.format(1) }}",
    "of a nested width": "{{ '{:>{}}'.format(1, 4000000000) }}",
    "of many places": "{{ ('{0}' * 100000).format('a' * 1000000) }}",
    "of replaced letters": "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "of a filter's replaced letters": "{{ ('a' * 100000)|replace('a', 'b' * 100000) }}",
    "of joined texts": "{{ (['a' * 100000] * 100000)|join }}",
    "of long commas": "{{ range(100000)|join('a' * 100000) }}",
    "of the method join": "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "of translated letters": "{{ ('a' * 100000).translate({97: 'b' * 100000}) }}",
    "of summed lists": "{{ ([[1] * 100000] * 100000)|sum(start=[])|length }}",
    "of bytes": "{{ (1).to_bytes(4000000000, 'big') }}",
    "of what is written": LOOP + "{{ 'a' * 10000 }}{% endfor %}",
    "of what a block keeps": "{% set s %}" + LOOP + "{{ 'a' * 10000 }}{% endfor %}{% endset %}",
    "of latin": "{{ lipsum(n=100000) }}",
}


@pytest.mark.parametrize("template", BOMBS.values(), ids=BOMBS)
def test_a_bomb_is_refused_before_it_takes_memory(template: str) -> None:
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
    with pytest.raises((TooMuchError, UndefinedError)):  # there is no lipsum
        rendered(template)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "KiB"
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("waits_for", [1, 2])
def test_nested_loops_end_also_of_a_template_that_behaved_before(
    waits_for: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_templates, "SECONDS", 0.5)
    condition = f"{{% if messages|length >= {waits_for} %}}"
    template = condition + LOOP + LOOP + "{% endfor %}{% endfor %}{% endif %}a"
    if waits_for == 2:
        assert rendered(template, MESSAGES[:1]) == "a"
    with pytest.raises(TooMuchError, match=r"has not written a chat in 0\.5 s"):
        rendered(template)
    assert rendered("a") == "a"


def test_bounds_are_those_of_one_rendering() -> None:
    for _ in range(10):
        assert len(rendered("{{ 'a' * 30000000 }}")) == 30_000_000


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}<{{ m['role'] }}>{{ m.content|trim + '\\n' }}{% endfor %}", None),
        ("{{ messages|tojson }}{{ messages|tojson(indent=2) }}", None),
        ("{% set n = namespace(i=0) %}{% for m in messages %}{% set n.i = n.i + 1 %}{% endfor %}"
         "{{ n.i ~ '/' ~ messages|length }} {{ 2 ** 5 }} {{ 7 % 2 }} {{ '%s-%d' % ('a', 3) }}",
         "2/2 32 1 a-3"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') + f('b') }}", "[a][b]"),
        ("{{ 'a b'.split(' ')|join(', ') }}{{ 'x'.replace('x', 'y') }}", "a, by"),
        ("{{ '{} {:02d}'.format(1, 2) }}", "1 02"),
        ("{% set t %}{{ 1700000000|string }}{% endset %}{{ t|length }}{{ t|indent(2) }}",
         "101700000000"),
        ("{{ ', '.join(['a', 'b']) }}{{ ['b', 'a']|sort|map('upper')|list }}", "a, b['A', 'B']"),
        ("{{ [1, 2]|sum }}{{ ([1] + [2])|length }}{{ '-' * 3 }}", "32---"),
    ],
)  # fmt: skip
def test_what_templates_do_is_as_in_transformers_own_sandbox(
    template: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = rendered(template)
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    monkeypatch.setattr(
        chat_template_utils, "ImmutableSandboxedEnvironment", ImmutableSandboxedEnvironment
    )
    compiled = chat_template_utils._cached_compile_jinja_template(template)
    assert ours == compiled.render(messages=MESSAGES, add_generation_prompt=True, tools=None)
    assert expected is None or ours == expected
