"""How a configuration dataclass declares a key: its default and the rules that stand at the field.

    @dataclass(kw_only=True)
    class OptimConfig(Section):
        lr: float = key(1e-6, at_least=0)
        lr_scheduler_type: str = key("constant", choices=("constant", "cosine", "linear"))
        min_lr_ratio: float = key(0.0, allows="a share", read_when=NOT_CONSTANT)

A rule that needs two fields is no rule of a field: it is a check of the recipe. Nothing here
imports torch: schemas are read on the way to `--help`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple, TypeVar

from verl_like.registry import registry_of

S = TypeVar("S")


class Section:
    """Base of a configuration's dataclasses: `freeze` makes an object read-only.

    A run composes and settles its configuration once, and only reads it afterwards. `changed` makes
    another one from it.
    """

    __slots__ = ("_is_frozen",)  # a slot is no field: `vars` of a section has its keys only

    def __setattr__(self, name: str, value: Any) -> None:
        if getattr(self, "_is_frozen", False):
            raise AttributeError(
                f"{type(self).__name__}.{name}={value!r}: the configuration of a run is only read. "
                "`verl_like.config_key.changed(config, {key: value})` returns another one."
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


def changed(section: S, changes: Mapping[str, Any]) -> S:
    """Return a copy of a section with other values at these dotted keys.

    The copy shares the sections without a change, and is read-only if `section` is.
    """
    by_field: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        first, _, rest = name.partition(".")
        by_field.setdefault(first, {})[rest] = value
    read = section.get if isinstance(section, Mapping) else functools.partial(getattr, section)
    values = {
        name: below[""] if "" in below else changed(read(name), below)
        for name, below in by_field.items()
    }
    if isinstance(section, Mapping):
        return {**section, **values}  # type: ignore[return-value]
    made: S = dataclasses.replace(section, **values)  # type: ignore[type-var]
    return freeze(made) if getattr(section, "_is_frozen", False) else made


@dataclass(frozen=True)
class When:
    """The condition under which a key, or all of a section, is read."""

    says: str
    """The condition in words, as the docs show it: "there is a critic"."""
    holds: Callable[[Any, Any], bool]
    """(section that the key stands in, whole configuration) -> whether the key is read."""
    otherwise: str
    """What is missing where it does not hold, as an error says it: "this run has no critic".

    `{section}` in it is the section's name and a dot.
    """

    def missing(self, section: str) -> str:
        """`otherwise` of a key in that section."""
        return self.otherwise.replace("{section}", f"{section}." if section else "")


def when(name: str, *values: Any, otherwise: str = "") -> When:
    """The key `name` has one of these values, or is true.

    A name with dots is that of the whole configuration, another one stands in the same section.
    """
    values = values or (True,)
    words = " or ".join(map(str, values))
    says, lacks = {
        "True": (f"`{name}`", "is false"),
        "False": (f"not `{name}`", "is true"),
        "None": (f"`{name}` is null", "is set"),
    }.get(words, (f"`{name}` is {words}", f"is not {words}"))
    return When(
        says,
        lambda section, run: _value(section, run, name) in values,
        otherwise or f"{_full(name)} {lacks}",
    )


def unless(name: str, value: Any = None, otherwise: str = "") -> When:
    """The key `name` has another value; without one, it is set. Names are those of `when`."""
    is_unset = value in (None, "")
    return When(
        f"`{name}` is set" if is_unset else f"`{name}` is not {value}",
        lambda section, run: _value(section, run, name) != value,
        otherwise or f"{_full(name)} is {'not set' if is_unset else value}",
    )


def entry_takes(parameter: str, kind: str, name: str) -> When:
    """What the key `name` names, in the registry of that kind, has a parameter of that name."""

    def holds(section: Any, run: Any) -> bool:
        entry = registry_of(kind).look_up(_value(section, run, name))
        return parameter in inspect.signature(entry).parameters

    missing = f"the {kind} that {_full(name)} names does not take {parameter}"
    return When(f"the {kind} takes `{parameter}`", holds, missing)


def _full(name: str) -> str:
    return name if "." in name else f"{{section}}{name}"


def _value(section: Any, run: Any, name: str) -> Any:
    *sections, last = name.split(".")
    return getattr(functools.reduce(getattr, sections, run) if sections else section, last)


@dataclass(frozen=True)
class KeyRules:
    """What is known of one key beside its type, default and docstring."""

    above: float | None = None
    """The value is larger than this."""
    at_least: float | None = None
    """The value is this or larger."""
    at_most: float | None = None
    """The value is this or smaller."""
    below: float | None = None
    """The value is smaller than this."""
    or_exactly: float | None = None
    """A value outside the range that has a meaning of its own, such as -1."""
    choices: tuple[str, ...] = ()
    """The values that there are; of a list, those of each item."""
    elsewhere: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Words of other systems for a choice -> that choice: a refusal of the word names it."""
    registry: str = ""
    """The kind of the registry that the value, or each item of a list, is looked up in.

    A dotted path is the user's own.
    """
    options: type | None = None
    """The dataclass whose fields are the names that a dict may have, with their types and rules."""
    arguments_of: str = ""
    """The key in the same section that names an entry of a registry. The dict has arguments of the
    entry: its keyword-only parameters with a default (`arguments_of`).
    """
    allows: str = ""
    """The values in words, where their type says too little and neither range nor choices do."""
    hint: str = ""
    """The end of a refusal, and of the values in the docs: "or null to keep all"."""
    required: str = ""
    """The key must not be empty; how to fill it."""
    read_when: tuple[When, ...] = ()
    """The key is read only where all of these hold."""
    may_change_on_resume: bool | None = None
    """A resumed run may have another value: it does not decide what is computed. Of a key that does
    not say, the attribute `may_change_on_resume` of its section's class decides.
    """
    verl: str = ""
    """The dotted key of the same thing in verl, where it has another name there."""


NO_RULES = KeyRules()


class Argument(NamedTuple):
    """A parameter of a function that a configuration may set."""

    kind: type
    default: Any
    rules: KeyRules


@functools.cache
def arguments_of(entry: Callable[..., Any]) -> dict[str, Argument]:
    """Name -> parameter that a configuration may set, by the signature of a registry's entry.

        def my_loss(log_prob, ..., *, beta: Annotated[float, KeyRules(above=0)] = 0.1): ...

    A function may have the attribute `takes_arguments_of`: the functions that it hands them to.
    """
    found = {}
    for function in getattr(entry, "takes_arguments_of", (entry,)):
        try:
            hints = typing.get_type_hints(function, include_extras=True)
        except NameError:  # a type that only a checker imports: any value will do
            hints = {}
        for name, parameter in inspect.signature(function).parameters.items():
            default = parameter.default
            if parameter.kind is parameter.KEYWORD_ONLY and default is not parameter.empty:
                kind, *notes = typing.get_args(hints.get(name)) or (hints.get(name, object),)
                rules = [note for note in notes if isinstance(note, KeyRules)]
                found[name] = Argument(kind, default, rules[0] if rules else NO_RULES)
    return found


def key(
    default: Any = MISSING,
    *,
    factory: Any = MISSING,
    read_when: When | Sequence[When] = (),
    **rules: Any,
) -> Any:
    """A dataclass field with its default (or `factory`) and `KeyRules`."""
    conditions = (read_when,) if isinstance(read_when, When) else tuple(read_when)
    metadata = {"rules": KeyRules(read_when=conditions, **rules)}

    if factory is not MISSING:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def rules_of(field: dataclasses.Field[Any]) -> KeyRules:
    """The rules that `key` put at a field; a plain field has none."""
    rules: KeyRules = field.metadata.get("rules", NO_RULES)
    return rules
