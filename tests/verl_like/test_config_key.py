"""A condition says in words when its key is read, and what is missing where it is not."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from verl_like.config_key import When, key, rules_of, unless, unread, when

RUN = SimpleNamespace(trainer=SimpleNamespace(backend="local"))


@pytest.mark.parametrize(
    ("condition", "value", "says", "missing"),
    [
        (when("on"), False, "`on`", "part.on is false"),
        (when("on", False), True, "not `on`", "part.on is true"),
        (when("on", None), 1, "`on` is null", "part.on is set"),
        (when("on", "a", "b"), "c", "`on` is a or b", "part.on is not a or b"),
        (unless("on"), None, "`on` is set", "part.on is not set"),
        (unless("on", 0), 0, "`on` is not 0", "part.on is 0"),
        (when("trainer.backend", "ray"), 1, "`trainer.backend` is ray", "trainer.backend is not r"),
        (when("on", otherwise="it is dark"), False, "`on`", "it is dark"),
    ],
)
def test_a_condition_is_told(condition: When, value: object, says: str, missing: str) -> None:
    section = SimpleNamespace(on=value)
    assert not condition.holds(section, RUN)
    assert condition.says == says
    assert condition.missing("part").startswith(missing)


def test_a_key_that_a_recipe_does_not_read_keeps_its_type_and_its_ancestors_rules() -> None:
    @dataclass
    class Base:
        size: int = key(4, above=0, required="give one")

    @unread("nothing has a size here", "size")
    @dataclass
    class Own(Base):
        other: int = key(1)

    size = next(field for field in dataclasses.fields(Own) if field.name == "size")
    (condition,) = rules_of(size).read_when
    assert (rules_of(size).above, rules_of(size).required) == (0, "")
    assert condition.missing("") == "nothing has a size here"
    assert rules_of(dataclasses.fields(Base)[0]).read_when == ()
