"""A function that a call would not fit is rejected with its signature and the call."""

from __future__ import annotations

import math
from typing import Any

import pytest

from verl_like.errors import ConfigError
from verl_like.registry import Registry
from verl_like.signatures import CallSignature, call_of, check_by_name, check_call, check_methods

SCORE = CallSignature("batch", by_name=("seed",))


class Base:
    def draw(self, rows: Any, *, seed: int, attempt: int = 0) -> None: ...

    @staticmethod
    def pad(rows: Any) -> None: ...

    @classmethod
    def make(cls, rows: Any) -> None: ...

    @property
    def size(self) -> int:
        return 0


def test_what_fits_is_let_through() -> None:
    check_call(lambda batch, seed: None, "it", SCORE)
    check_call(lambda *values, **named: None, "it", SCORE)
    check_call(lambda other_name, *, seed=1, more=2: None, "it", SCORE)
    check_call(type("Made", (), {"__init__": lambda self, batch, seed: None}), "it", SCORE)
    check_call(dict, "it", SCORE)  # written in C


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (
            lambda batch: None,
            r"it has .*\(batch\), but is called with \(batch, \*, seed\): got an ",
        ),
        (lambda batch, seed, more: None, "missing a required argument: 'more'"),
        (lambda batch, sede: None, "missing a required argument: 'sede'"),
        (3, "it is a int, which cannot be called"),
    ],
)
def test_what_does_not_fit_is_refused_with_both(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_call(function, "it", SCORE)


def test_a_parameter_without_a_name_cannot_be_filled_by_name() -> None:
    check_by_name(lambda a, *rest, b=1, **more: None, "it")
    check_by_name(math.hypot, "it")
    with pytest.raises(ConfigError, match=r"it has .*\(a, /, b\), but is called by name with"):
        check_by_name(lambda a, /, b: None, "it")


def test_the_call_of_a_method_has_what_it_must_be_given() -> None:
    assert str(call_of(vars(Base)["draw"])) == "(rows, *, seed)"
    assert str(call_of(vars(Base)["pad"])) == str(call_of(vars(Base)["make"])) == "(rows)"


def test_methods_of_a_subclass_take_what_those_of_its_base_take() -> None:
    class Fits(Base):
        def draw(self, rows: Any, seed: int, attempt: int = 0, more: int = 0) -> None: ...

        @staticmethod
        def pad(anything: Any) -> None: ...

        def of_its_own(self, a: int, b: int) -> None: ...

    class Narrow(Fits):
        @classmethod
        def make(cls) -> None: ...

    check_methods(Fits, Base, "my.Fits")
    check_methods(Narrow, Base, "my.Narrow", names=["draw"])
    with pytest.raises(ConfigError, match=r"my.Narrow: its make has .*\(\), but is called with"):
        check_methods(Narrow, Base, "my.Narrow")


def test_a_registry_refuses_what_cannot_be_called_as_it_will_be() -> None:
    losses: Registry[Any] = Registry("loss", lambda found, what: check_call(found, what, SCORE))
    losses.register("of_ours")("of_ours")  # a name that another module has
    losses.register("fits")(lambda batch, seed: None)
    with pytest.raises(ConfigError, match=r"^loss 'mine' has .*\(\), but is called with \(batch"):
        losses.register("mine")(lambda: None)
    assert "mine" not in losses
    with pytest.raises(ConfigError, match="^loss 'math.pi' is a float"):
        losses.look_up("math.pi")
