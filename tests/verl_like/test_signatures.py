"""A function that a call would not fit is rejected with its signature and the call."""

from __future__ import annotations

import math
from typing import Any

import pytest

from verl_like.errors import ConfigError
from verl_like.registry import (
    CallSignature,
    Registry,
    call_of,
    check_by_name,
    check_call,
    check_methods,
)

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


def test_matching_signatures_are_accepted() -> None:
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
        (3, "it has the type int, which cannot be called"),
    ],
)
def test_a_wrong_signature_is_rejected_with_the_call(function: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_call(function, "it", SCORE)


def test_positional_only_parameters_are_rejected() -> None:
    check_by_name(lambda a, *rest, b=1, **more: None, "it")
    check_by_name(math.hypot, "it")
    with pytest.raises(ConfigError, match=r"it has .*\(a, /, b\), but is called by name with"):
        check_by_name(lambda a, /, b: None, "it")


def test_call_of_has_the_required_arguments() -> None:
    assert str(call_of(vars(Base)["draw"])) == "(rows, *, seed)"
    assert str(call_of(vars(Base)["pad"])) == str(call_of(vars(Base)["make"])) == "(rows)"


def test_methods_of_a_subclass_must_accept_the_calls_of_its_base() -> None:
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


def test_a_registry_rejects_functions_with_a_wrong_signature() -> None:
    losses: Registry[Any] = Registry("loss", lambda found, what: check_call(found, what, SCORE))
    losses.register("of_ours")("of_ours")  # a name that another module has
    losses.register("fits")(lambda batch, seed: None)
    with pytest.raises(ConfigError, match=r"^loss 'mine' has .*\(\), but is called with \(batch"):
        losses.register("mine")(lambda: None)
    assert "mine" not in losses
    with pytest.raises(ConfigError, match="^loss 'math.pi' has the type float"):
        losses.look_up("math.pi")
