"""Whether code of the user's can be called as it will be, asked before anything runs.

    LOSS = Call("old_log_prob", "log_prob", by_name=("advantages", "response_mask"))
    check_call(my_loss, "policy loss 'my_module.my_loss'", LOSS)
    check_methods(MyEngine, RolloutEngine, "rollout.name=my_module.MyEngine")

A registry checks what it finds by such a rule (`verl_like.registry`). Of what is written in C
nothing is known, and nothing refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from verl_like.errors import ConfigError

Check = Callable[[Any, str], None]
"""(object, how messages begin) -> None, or a `ConfigError`."""
BOUND_OTHERWISE = (staticmethod, classmethod)


class Call:
    """What a call gives: values by position, which have these names here, and others by name."""

    def __init__(self, *by_position: str, by_name: Sequence[str] = ()) -> None:
        self.by_position, self.by_name = by_position, tuple(by_name)

    def __str__(self) -> str:
        """As in code: `(batch, *, seed)`."""
        named = ("*", *self.by_name) if self.by_position and self.by_name else self.by_name
        return f"({', '.join([*self.by_position, *named])})"


def check_call(function: Any, subject: str, call: Call) -> None:
    """Refuse what is no function, and one that this call would not fit."""
    if not callable(function):
        raise ConfigError(
            f"{subject} is a {type(function).__name__}, which cannot be called: name a function, "
            "or a class."
        )
    signature = signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*call.by_position, **dict.fromkeys(call.by_name))
    except TypeError as error:
        kind = "by name with" if call.by_name and not call.by_position else "with"
        raise ConfigError(
            f"{subject} takes {in_words(signature)}, and is called {kind} {call}: {error}. Change "
            "its parameters, or give the others a default."
        ) from error


def check_by_name(function: Any, subject: str) -> None:
    """Refuse what is no function, and one with a parameter that cannot be filled by its name."""
    signature = signature_of(function) if callable(function) else None
    names = signature.parameters.values() if signature else ()
    check_call(function, subject, Call(by_name=[each.name for each in names if is_asked(each)]))


def check_methods(
    cls: type, base: type, subject: str, names: Collection[str] | None = None
) -> None:
    """Refuse a subclass without a method that it must have, or with one that does not fit.

    A method of the user's takes what that of `base` takes; only these `names`, if they are given.
    """
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        raise ConfigError(f"{subject} has no {', '.join(missing)}: a class of its kind needs it.")
    for name in _methods_beyond(cls, base) if names is None else names:
        ours = inspect.getattr_static(base, name, None)
        if inspect.isfunction(ours) or isinstance(ours, BOUND_OTHERWISE):
            check_method(cls, name, subject, call_of(ours))


def check_method(owner: Any, name: str, subject: str, call: Call) -> None:
    """Refuse a method of a class, or of an object, that this call would not fit."""
    is_unbound = isinstance(owner, type) and not isinstance(
        inspect.getattr_static(owner, name), BOUND_OTHERWISE
    )
    whole = Call("self", *call.by_position, by_name=call.by_name) if is_unbound else call
    check_call(getattr(owner, name), f"{subject}: its {name}", whole)


def call_of(method: Any) -> Call:
    """The shortest call that a method of ours takes, less `self` and the like."""
    function = method.__func__ if isinstance(method, BOUND_OTHERWISE) else method
    signature = signature_of(function)
    if signature is None:
        return Call()
    bound = 0 if isinstance(method, staticmethod) else 1
    needed = [each for each in signature.parameters.values() if is_asked(each)]
    by_position = [each.name for each in needed if each.kind is not each.KEYWORD_ONLY]
    by_name = [each.name for each in needed if each.kind is each.KEYWORD_ONLY]
    return Call(*by_position[bound:], by_name=by_name)


def signature_of(function: Any) -> inspect.Signature | None:
    """The signature, where there is one to be had."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def in_words(signature: inspect.Signature) -> str:
    """The parameters without their types, as in code."""
    bare = [
        each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def _methods_beyond(cls: type, base: type) -> list[str]:
    """What the classes between `base` and `cls` define, but for Python's own methods."""
    names = []
    for each in cls.__mro__:
        for name, value in vars(each).items():
            is_method = inspect.isfunction(value) or isinstance(value, BOUND_OTHERWISE)
            if is_method and each not in base.__mro__ and not name.startswith("__"):
                names.append(name)
    return names


def is_asked(parameter: inspect.Parameter) -> bool:
    """Whether a call must give it."""
    takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not takes_many
