"""A condition describes when its key is read, and what is missing otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from verl_like.config_key import ReadWhen, unless, when

RUN = SimpleNamespace(trainer=SimpleNamespace(backend="local"))


@pytest.mark.parametrize(
    ("condition", "value", "says", "missing"),
    [
        (when("on"), False, "`on` is true", "part.on is false"),
        (when("on", False), True, "`on` is false", "part.on is true"),
        (when("on", None), 1, "`on` is null", "part.on is set"),
        (when("on", "a", "b"), "c", "`on` is a or b", "part.on is not a or b"),
        (unless("on"), None, "`on` is set", "part.on is not set"),
        (unless("on", 0), 0, "`on` is not 0", "part.on is 0"),
        (when("trainer.backend", "ray"), 1, "`trainer.backend` is ray", "trainer.backend is not r"),
        (when("on", otherwise="it is dark"), False, "`on` is true", "it is dark"),
    ],
)
def test_a_condition_describes_itself(
    condition: ReadWhen, value: object, says: str, missing: str
) -> None:
    section = SimpleNamespace(on=value)
    assert not condition.condition(section, RUN)
    assert condition.description == says
    assert condition.missing("part", RUN).startswith(missing)
