"""Check, before anything runs, that the user's code accepts the calls that it will get.

    LOSS = CallSignature("old_log_prob", "log_prob", by_name=("advantages", "response_mask"))
    check_call(my_loss, "policy loss 'my_module.my_loss'", LOSS)
    check_methods(MyEngine, RolloutEngine, "rollout.name=my_module.MyEngine")

Registries use such checks (`verl_like.registry`). Functions without a known signature, such as some
that are written in C, are accepted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from typing import Any

from verl_like.errors import ConfigError

Check = Callable[[Any, str], None]
"""(object, beginning of messages) -> None, or raise a `ConfigError`."""
BOUND_OTHERWISE = (staticmethod, classmethod)


class CallSignature:
    """The arguments of a call: values by position, with names for messages, and others by name."""

    def __init__(self, *by_position: str, by_name: Sequence[str] = ()) -> None:
        self.by_position, self.by_name = by_position, tuple(by_name)

    def __str__(self) -> str:
        """Return the arguments as in code: `(batch, *, seed)`."""
        named = ("*", *self.by_name) if self.by_position and self.by_name else self.by_name
        return f"({', '.join([*self.by_position, *named])})"


def check_call(function: Any, subject: str, call: CallSignature) -> None:
    """Reject an object that is not callable or does not accept this call."""
    if not callable(function):
        raise ConfigError(
            f"{subject} has the type {type(function).__name__}, which cannot be called. Use a "
            "function or a class."
        )
    signature = signature_of(function)
    if signature is None:
        return
    try:
        signature.bind(*call.by_position, **dict.fromkeys(call.by_name))
    except TypeError as error:
        kind = "by name with" if call.by_name and not call.by_position else "with"
        raise ConfigError(
            f"{subject} has the parameters {format_signature(signature)}, but is called {kind} "
            f"{call}: {error}. Let it accept these arguments, and give any other parameter a "
            "default."
        ) from error


def check_by_name(function: Any, subject: str) -> None:
    """Reject an object that is not callable, or that requires a positional-only argument."""
    signature = signature_of(function) if callable(function) else None
    names = signature.parameters.values() if signature else ()
    check_call(
        function,
        subject,
        CallSignature(by_name=[parameter.name for parameter in names if is_required(parameter)]),
    )


def check_methods(
    cls: type, base: type, subject: str, names: Collection[str] | None = None
) -> None:
    """Reject a subclass that lacks a required method or has a method that does not fit.

    A user's method must accept the required arguments of the method of `base`. If `names` is set,
    only these methods are checked.
    """
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(
            f"{subject} does not implement {', '.join(missing)}, which its base class requires."
        )
    if names is None:
        names = _methods_beyond(cls, base)
    for name in names:
        ours = inspect.getattr_static(base, name, None)
        if inspect.isfunction(ours) or isinstance(ours, BOUND_OTHERWISE):
            check_method(cls, name, subject, call_of(ours))


def check_method(owner: Any, name: str, subject: str, call: CallSignature) -> None:
    """Reject a method of a class or object that does not accept this call."""
    is_unbound = isinstance(owner, type) and not isinstance(
        inspect.getattr_static(owner, name), BOUND_OTHERWISE
    )
    full = CallSignature("self", *call.by_position, by_name=call.by_name) if is_unbound else call
    check_call(getattr(owner, name), f"{subject}: its {name}", full)


def call_of(method: Any) -> CallSignature:
    """Return the shortest call that a method of this project accepts, without `self`."""
    function = method.__func__ if isinstance(method, BOUND_OTHERWISE) else method
    signature = signature_of(function)
    if signature is None:
        return CallSignature()
    bound = 0 if isinstance(method, staticmethod) else 1
    needed = [parameter for parameter in signature.parameters.values() if is_required(parameter)]
    by_position = [
        parameter.name for parameter in needed if parameter.kind is not parameter.KEYWORD_ONLY
    ]
    by_name = [parameter.name for parameter in needed if parameter.kind is parameter.KEYWORD_ONLY]
    return CallSignature(*by_position[bound:], by_name=by_name)


def signature_of(function: Any) -> inspect.Signature | None:
    """Return the signature of a function, or None if it is not known."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def format_signature(signature: inspect.Signature) -> str:
    """Return the parameters without their types, as in code."""
    bare = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in signature.parameters.values()
    ]
    return str(inspect.Signature(bare))


def _methods_beyond(cls: type, base: type) -> list[str]:
    """Return the methods that `cls` and its parents below `base` define, except `__x__`."""
    names = []
    for parent in cls.__mro__:
        for name, value in vars(parent).items():
            is_method = inspect.isfunction(value) or isinstance(value, BOUND_OTHERWISE)
            if is_method and parent not in base.__mro__ and not name.startswith("__"):
                names.append(name)
    return names


def is_required(parameter: inspect.Parameter) -> bool:
    """Return whether a call must pass this parameter."""
    takes_many = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and not takes_many
