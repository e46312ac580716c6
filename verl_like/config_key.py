"""Declare a key of the configuration: a dataclass field with its default and its rules.

    @dataclass(kw_only=True)
    class OptimConfig(Section):
        lr: float = config_field(1e-6, at_least=0)
        lr_scheduler_type: str = config_field("constant", choices=("constant", "cosine", "linear"))
        min_lr_ratio: float = config_field(0.0, at_least=0, at_most=1, read_when=NOT_CONSTANT)

A rule about two fields does not belong to a field: it is a check of the recipe. Nothing here
imports torch, because `--help` reads the schemas.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, NamedTuple, TypeVar

from verl_like.registry import get_registry, signature_of

S = TypeVar("S")


class Section:
    """Base of a configuration's dataclasses; `freeze` makes an object read-only.

    A run composes and settles its configuration once, and only reads it afterwards. `replace_keys`
    returns a modified copy.
    """

    __slots__ = ("_is_frozen",)  # a slot is not a field, so `vars` of a section has only its keys

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_is_frozen", False):
            raise AttributeError(
                f"{type(self).__name__}.{name}={value!r}: the configuration of a run is "
                "read-only. Use `verl_like.extend.replace_keys(config, {key: value})` to get a "
                "changed copy."
            )
        object.__setattr__(self, name, value)


def freeze(config: S) -> S:
    """Make a configuration and all its sections read-only; return it."""
    if isinstance(config, Mapping):
        for value in config.values():
            freeze(value)
    elif isinstance(config, list | tuple):
        for value in config:
            freeze(value)
    elif dataclasses.is_dataclass(config):
        for value in vars(config).values():
            freeze(value)
        if isinstance(config, Section):
            object.__setattr__(config, "_is_frozen", True)
    return config


def replace_keys(section: S, changes: Mapping[str, Any]) -> S:
    """Return a copy of a section with other values at some keys.

        optim = replace_keys(config, {"lr": 1e-5, "weight_decay": 0.1})

    Args:
        section: a section or a mapping. The copy shares the sections inside it that do not change,
            and is read-only if `section` is.
        changes: dotted key -> new value.
    """
    by_field: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        by_field.setdefault(first, {})[rest] = value
    read = section.get if isinstance(section, Mapping) else functools.partial(getattr, section)
    values = {
        name: below[""] if "" in below else replace_keys(read(name), below)
        for name, below in by_field.items()
    }
    if isinstance(section, Mapping):
        return {**section, **values}  # type: ignore[return-value]
    copied: S = dataclasses.replace(section, **values)  # type: ignore[type-var]
    return freeze(copied) if getattr(section, "_is_frozen", False) else copied


@dataclass(frozen=True)
class ReadWhen:
    """The condition under which a key or a section is read.

    Example:

        has_target = lambda section, run: section.target is not None
        ReadWhen("there is a target", has_target, "{section}target is null")

    Args:
        description: the condition in words for the docs: "there is a critic".
        condition: returns whether the key is read, from its section and the whole configuration.
        reason: the reason in errors if the condition is false, such as "this run has no
            teacher", or a function of the configuration that returns it. `{section}` stands for the
            section's name and a dot.
    """

    description: str
    condition: Callable[[Any, Any], bool]
    reason: str | Callable[[Any], str]

    def missing(self, section: str, run: Any) -> str:
        """Return `reason` for the configuration `run`, with the name of the section filled in."""
        text = self.reason if isinstance(self.reason, str) else self.reason(run)
        return text.replace("{section}", f"{section}." if section else "")


def when(name: str, *values: Any, otherwise: str = "") -> ReadWhen:
    """Return the condition that a key has one of these values, or without values, that it is true.

    A `name` with dots is a key of the whole configuration, any other a key of the same section.
    """
    values = values or (True,)
    words = " or ".join(map(str, values))
    says, lacks = {
        "True": (f"`{name}` is true", "is false"),
        "False": (f"`{name}` is false", "is true"),
        "None": (f"`{name}` is null", "is set"),
    }.get(words, (f"`{name}` is {words}", f"is not {words}"))
    return ReadWhen(
        says,
        lambda section, run: _value(section, run, name) in values,
        otherwise or f"{_full(name)} {lacks}",
    )


def unless(name: str, value: Any = None, otherwise: str = "") -> ReadWhen:
    """Return the condition that a key has another value, or without a value, that it is set.

    Names are as in `when`.
    """
    is_unset = value in (None, "")
    return ReadWhen(
        f"`{name}` is set" if is_unset else f"`{name}` is not {value}",
        lambda section, run: _value(section, run, name) != value,
        otherwise or f"{_full(name)} is {'not set' if is_unset else value}",
    )


def entry_takes(parameter: str, kind: str, name: str) -> ReadWhen:
    """Return the condition that the registry entry which a key names has this parameter."""

    def holds(section: Any, run: Any) -> bool:
        entry = get_registry(kind).look_up(_value(section, run, name))
        return parameter in inspect.signature(entry).parameters

    missing = f"the {kind} that {_full(name)} names has no parameter {parameter}"
    return ReadWhen(f"the {kind} has the parameter `{parameter}`", holds, missing)


def _full(name: str) -> str:
    return name if "." in name else f"{{section}}{name}"


def _value(section: Any, run: Any, name: str) -> Any:
    *sections, last = name.split(".")
    return getattr(functools.reduce(getattr, sections, run) if sections else section, last)


@dataclass(frozen=True)
class KeyRules:
    """The rules of one key, besides its type, default and docstring.

        def my_loss(log_prob, *, beta: Annotated[float, KeyRules(above=0)] = 0.1, **inputs): ...

    Args:
        above: the value is greater than this.
        at_least: the value is at least this.
        at_most: the value is at most this.
        below: the value is less than this.
        or_exactly: a value outside the range that has a special meaning, such as -1.
        choices: the valid values, of the key or of each item of its list.
        elsewhere: other systems' words -> the choice that the error for the word suggests.
        registry: the kind of the registry in which the value, or each item of a list, is looked up.
            A path (`my_module.name`, `file.py:name`) names the user's own code.
        options: the dataclass whose fields are the valid names of a dict, with types and rules.
        arguments_of: the key in the same section that names an entry of a registry. The value is a
            dict of the entry's arguments (see `settable_arguments`), except those that are keys of
            the section.
        allows: the values in words, if neither type, range nor choices describe them.
        hint: the end of an error message, and of the values in the docs: "or null to keep all".
        required: if set, the key must not be empty; explains how to fill it.
        read_when: the key is read only if all of these hold.
        may_change_on_resume: True if a resumed run may have another value, because the key does not
            affect the results. If None, the attribute `may_change_on_resume` of the section's class
            decides.
        verl: the dotted key in verl, if it has another name there.
    """

    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    below: float | None = None
    or_exactly: float | None = None
    choices: tuple[str, ...] = ()
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    registry: str = ""
    options: type | None = None
    arguments_of: str = ""
    allows: str = ""
    hint: str = ""
    required: str = ""
    read_when: tuple[ReadWhen, ...] = ()
    may_change_on_resume: bool | None = None
    verl: str = ""


NO_RULES = KeyRules()


class Argument(NamedTuple):
    """A parameter of a function that a configuration may set."""

    kind: type
    default: Any
    rules: KeyRules


@functools.cache
def settable_arguments(entry: Callable[..., Any]) -> dict[str, Argument]:
    """Return name -> parameter of a registry's entry, for parameters that a configuration may set.

        def my_loss(log_prob, *, beta: Annotated[float, KeyRules(above=0)] = 0.1, **inputs): ...

    These are the keyword-only parameters of a function, or all parameters of a class, if they have
    a default. A function may pass its arguments on to others, which its attribute
    `takes_arguments_of` lists.
    """
    arguments = {}
    for function in getattr(entry, "takes_arguments_of", (entry,)):
        is_class = isinstance(function, type)
        try:
            typed = function.__init__ if is_class else function
            hints = typing.get_type_hints(typed, include_extras=True)
        except NameError:  # a type that only a checker imports: accept any value
            hints = {}
        signature = signature_of(function)
        if signature is None:
            continue
        for name, parameter in signature.parameters.items():
            is_option = is_class or parameter.kind is parameter.KEYWORD_ONLY
            if is_option and parameter.default is not parameter.empty:
                hint = hints.get(name, object)
                is_annotated = typing.get_origin(hint) is Annotated
                kind, *notes = typing.get_args(hint) if is_annotated else (hint,)
                rules = [note for note in notes if isinstance(note, KeyRules)]
                arguments[name] = Argument(kind, parameter.default, rules[0] if rules else NO_RULES)
    return arguments


def select_arguments(entry: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of the arguments that this registry entry takes."""
    return {name: arguments[name] for name in settable_arguments(entry) if name in arguments}


def config_field(
    default: Any = MISSING,
    *,
    factory: Any = MISSING,
    read_when: ReadWhen | Sequence[ReadWhen] = (),
    **rules: Any,
) -> Any:
    """Return a dataclass field for a key, with its default and `KeyRules`.

    Example:

        @dataclass
        class MySection:
            threshold: float = config_field(0.5, at_least=0, at_most=1)
            # below the field, a docstring explains the key

    Args:
        default: the default; without it and `factory`, users must set the key.
        factory: returns the default; use it for lists and dicts.
        read_when: the conditions under which a run reads the key. Set otherwise, it has no effect,
            and a notice says so.
        rules: the fields of `KeyRules`.
    """
    conditions = (read_when,) if isinstance(read_when, ReadWhen) else tuple(read_when)
    metadata = {"rules": KeyRules(read_when=conditions, **rules)}

    if factory is not MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def key_rules(field: dataclasses.Field[Any]) -> KeyRules:
    """Return the rules that `config_field` attached to a field; a plain field has none."""
    rules: KeyRules = field.metadata.get("rules", NO_RULES)
    return rules
