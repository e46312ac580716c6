"""A configuration as dotted keys: types and rules, and values, which are also a hash and YAML."""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import inspect
import json
import math
import operator
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer.config.schema import RunConfig
from verl_like.config_key import KeyRules, ReadWhen, key_rules, settable_arguments
from verl_like.masking import masked
from verl_like.registry import get_registry

KINDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
}
"""A key's type -> the description of its values."""
_keys_of: dict[type, dict[str, Key]] = {}
_named_keys_of: dict[type, dict[str, Key]] = {}
"""Schema -> its keys, as caches."""


@dataclass(frozen=True)
class Key:
    """A key, or a section of keys."""

    name: str
    """Dotted, from the root of the schema."""
    kind: Any
    """Its type; for a section, the dataclass."""
    rules: KeyRules

    @property
    def section(self) -> str:
        """The dotted name of the section around it; "" for the root."""
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        """The key's name in its section."""
        return self.name.rpartition(".")[2]

    @cached_property
    def is_section(self) -> bool:
        """True if it has keys of the schema below it."""
        return dataclasses.is_dataclass(self.kind)

    @cached_property
    def takes_any(self) -> bool:
        """True if users name their own keys below it, as in `role_mapping`."""
        return typing.get_origin(self.kind) is dict

    @cached_property
    def item_schema(self) -> type | None:
        """The schema of the items of a list of sections, such as `reward.list`, or of a dict."""
        is_collection = typing.get_origin(self.kind) in (list, dict)
        item = typing.get_args(self.kind)[-1] if is_collection else None
        return item if dataclasses.is_dataclass(item) and isinstance(item, type) else None

    @cached_property
    def is_optional(self) -> bool:
        """True if null is allowed."""
        union = typing.get_origin(self.kind) in (typing.Union, types.UnionType)
        return union and type(None) in typing.get_args(self.kind)

    @property
    def allowed(self) -> str:
        """The allowed values in words; "" if nothing is declared."""
        rules = self.rules
        names = [key.name for key in leaf_keys(rules.options)] if rules.options else ()
        words = self.range or ", ".join(rules.choices or names) or rules.allows
        if rules.registry:
            words = f"{', '.join(get_registry(rules.registry))}, or a dotted path"
        if not words and (self.kind is bool or bool in typing.get_args(self.kind)):
            words = "true, false"

        if rules.hint and self.range:
            return f"{words}, {rules.hint}"
        return f"{words}, or null" if words and self.is_optional else words

    @property
    def range(self) -> str:
        """The allowed numbers in words; "" without a range."""
        rules = self.rules
        if rules.at_least is not None and rules.at_most is not None:
            return f"from {rules.at_least:g} to {rules.at_most:g}"
        return " and ".join(words.format(limit) for words, _, limit in self.bounds)

    @property
    def bounds(self) -> list[tuple[str, Callable[[float, float], bool], float]]:
        """The declared limits: (words, comparison with a number, limit)."""
        rules = self.rules
        bounds = [
            ("above {:g}", operator.gt, rules.above),
            ("{:g} or more", operator.ge, rules.at_least),
            ("at most {:g}", operator.le, rules.at_most),
            ("below {:g}", operator.lt, rules.below),
        ]
        return [(words, allows, limit) for words, allows, limit in bounds if limit is not None]

    @property
    def describe_rules(self) -> str:
        """The key's rules on one line: values, condition, whether it may change, verl's name."""
        words = [self.allowed]
        if self.rules.read_when:
            conditions = " and ".join(condition.description for condition in self.rules.read_when)
            words.append(f"read when {conditions}")
        if self.rules.may_change_on_resume:
            words.append("may change on resume")
        if self.rules.verl:
            words.append(f"in verl: {self.rules.verl}")
        return "; ".join(part for part in words if part)


def config_keys(schema: type) -> tuple[Key, ...]:
    """Return every key of a schema, sections included, in the order of declaration."""
    return tuple(keys_by_name(schema).values())


def keys_by_name(schema: type) -> Mapping[str, Key]:
    """Return dotted name -> key or section."""
    if schema in _keys_of:
        return _keys_of[schema]
    keys: dict[str, Key] = {}
    kinds = typing.get_type_hints(schema)
    may_change = getattr(schema, "may_change_on_resume", False)
    for field in dataclasses.fields(schema):
        rules = key_rules(field)
        if rules.may_change_on_resume is None:
            rules = replace(rules, may_change_on_resume=may_change)
        key = keys[field.name] = Key(field.name, kinds[field.name], rules)
        if key.is_section:
            for below in config_keys(key.kind):
                name = f"{field.name}.{below.name}"
                keys[name] = replace(below, name=name)
    never_read: Mapping[str, Sequence[str]] = getattr(schema, "never_read", {})
    for reason, names in never_read.items():
        never = ReadWhen("never in this recipe", lambda *_: False, reason)
        for name in names:
            rules = replace(keys[name].rules, read_when=(never,), required="")
            keys[name] = replace(keys[name], rules=rules)
    _keys_of[schema] = keys
    return keys


def named_keys(schema: type) -> Mapping[str, Key]:
    """Return dotted name -> key, section or option, for all names that a setting may use."""
    if schema in _named_keys_of:
        return _named_keys_of[schema]
    keys = dict(keys_by_name(schema))
    for key in [*keys.values()]:
        if key.rules.options:
            for option in config_keys(key.rules.options):
                name = f"{key.name}.{option.name}"
                keys[name] = replace(option, name=name)
    _named_keys_of[schema] = keys
    return keys


def leaf_keys(schema: type) -> list[Key]:
    """Return the keys of a schema without its sections."""
    return [key for key in keys_by_name(schema).values() if not key.is_section]


@functools.cache
def field_docs(schema: type, prefix: str = "") -> dict[str, str]:
    """Return the docstring under each field of a schema, by dotted key."""
    docs: dict[str, str] = {}
    for cls in reversed(schema.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
        assert isinstance(body, ast.ClassDef), f"{cls} is a class"
        for field, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
            ):
                docs[prefix + field.target.id] = inspect.cleandoc(ast.literal_eval(after.value))
    for key in config_keys(schema):
        if key.is_section and "." not in key.name:
            docs |= field_docs(key.kind, f"{prefix}{key.name}.")
    return docs


def path_to(schema: type, name: str) -> list[Key]:
    """Return the sections around a dotted key, outermost first, and the key.

    For a user's name, such as `role_mapping.judge`, the last is the key that takes it.
    """
    known, words = keys_by_name(schema), name.split(".")
    around = (".".join(words[:number]) for number in range(1, len(words) + 1))
    return [known[dotted] for dotted in around if dotted in known]


def leaves_of(config: Any) -> Iterator[tuple[Key, Any]]:
    """Yield every key that is not a section, with the object of its section."""
    for key in keys_by_name(type(config)).values():
        if not key.is_section:
            yield key, value_at(config, key.section)


def leaves_of_items(config: Any) -> Iterator[tuple[Key, Any]]:
    """Like `leaves_of`, but for sections in values: yield keys such as `reward.list[0].name`."""
    for key, section in leaves_of(config):
        value, items = getattr(section, key.leaf), dict[str, Any]()
        if key.rules.options is not None and value:
            items = {key.name: key.rules.options(**value)}
        elif key.item_schema and isinstance(value, dict):
            items = {f"{key.name}.{name}": item for name, item in value.items()}
        elif key.item_schema:
            items = {f"{key.name}[{number}]": item for number, item in enumerate(value)}
        for name, item in items.items():
            for field, inner in leaves_of(item):
                yield replace(field, name=f"{name}.{field.name}"), inner


@dataclass(frozen=True)
class Arguments:
    """Arguments of registered entries, as keys below a key with `KeyRules.arguments_of`."""

    kind: str
    """Kind of the registry, such as "policy loss"."""
    taken: Mapping[str, Key]
    """The keys of the entry that the section selects."""
    known: Mapping[str, Key]
    """The keys of all registered entries."""

    @classmethod
    def of(cls, key: Key, section: Any) -> Arguments:
        """Return the arguments at `key`; `section` is the object or dataclass of its section."""
        schema = section if isinstance(section, type) else type(section)
        siblings = {field.name: field for field in dataclasses.fields(schema)}
        registry = get_registry(key_rules(siblings[key.rules.arguments_of]).registry)
        entry = registry.look_up(getattr(section, key.rules.arguments_of))

        def keys_of(*entries: Any) -> dict[str, Key]:
            return {
                name: Key(f"{key.name}.{name}", argument.kind, argument.rules)
                for function in entries
                for name, argument in settable_arguments(function).items()
                if name not in siblings
            }

        return cls(registry.kind, keys_of(entry), keys_of(*registry.values()))


def known_arguments(schema: type) -> list[Key]:
    """Return the arguments of all registered entries that have been imported, as keys."""
    sections = keys_by_name(schema)
    return [
        argument
        for key in config_keys(schema)
        if key.rules.arguments_of
        for argument in Arguments.of(key, sections[key.section].kind).known.values()
    ]


def may_change_on_resume(schema: type, name: str) -> bool:
    """Return whether a resumed run may change the key: it, or a section around it, is marked so."""
    return any(key.rules.may_change_on_resume for key in path_to(schema, name))


def keys_that_differ(schema: type, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the keys that a resumed run has changed although they may not change."""
    return [
        f"{key} was {before[key]!r}, is {value!r}"
        for key, value in now.items()
        if before.get(key, value) != value and not may_change_on_resume(schema, key)
    ]


def value_at(config: Any, name: str) -> Any:
    """Return the value at a dotted key; "" is the configuration itself."""
    if name:
        for part in name.split("."):
            config = getattr(config, part)
    return config


MAYBE_A_NUMBER = tuple("+-.0123456789")
"""First characters of texts that OmegaConf, which accepts more than PyYAML, may read as numbers."""
MAX_VALUES = 100_000
"""Number of values that a YAML text with aliases may have."""
YES_AND_NO = ("y", "Y", "n", "N")
"""Texts that other readers parse as true and false."""
NAMES_OF_A_RUN = frozenset(
    {"trainer.project_name", "trainer.experiment_name", "trainer.default_local_dir"}
)


def flat_config(config: RunConfig) -> dict[str, Any]:
    """Return a configuration as dotted key -> value, in JSON's types."""
    return flatten(masked(json.loads(json.dumps(dataclasses.asdict(config), default=str))))


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts as dotted key -> value; `prefix` is a section's name and a dot."""
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def config_hash(config: RunConfig) -> str:
    """Return the hash of a configuration's values.

    The run's name, project and folder do not count. The hash has twelve hexadecimal digits;
    `config.yaml` of the run folder begins with it.
    """
    flat = flat_config(config)
    counted = {key: value for key, value in flat.items() if key not in NAMES_OF_A_RUN}
    text = json.dumps([type(config).__name__, counted], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def checked_yaml(text: str) -> str:
    """Return a YAML text from someone else; raise ValueError if it is invalid or expands too far.

    A few lines of aliases to aliases are billions of values for a program that visits them.
    """
    sizes: dict[int, float] = {}

    def size(node: Any) -> float:
        if id(node) not in sizes:
            sizes[id(node)] = math.inf  # until it is known: a node that contains itself has no end
            pairs = isinstance(node, yaml.MappingNode)
            below = [inner for pair in node.value for inner in pair] if pairs else node.value
            is_scalar = isinstance(node, yaml.ScalarNode)
            sizes[id(node)] = 1 + (0 if is_scalar else sum(map(size, below)))
        return sizes[id(node)]

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        num_values = 0 if root is None else size(root)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if num_values > max(MAX_VALUES, len(sizes)):
        raise ValueError(f"its aliases expand to {num_values:,.0f} values (limit: {MAX_VALUES:,})")
    return text


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """A dumper that quotes texts which could be read as numbers."""


def _text(dumper: Any, text: str) -> Any:
    style = "'" if text.startswith(MAYBE_A_NUMBER) or text in YES_AND_NO else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def in_yaml(values: Mapping[str, Any]) -> str:
    """Return dicts, lists, numbers, texts, true, false and null as YAML, one key per line.

    OmegaConf reads it back unchanged; its own `to_yaml` takes twenty times as long.
    """
    written: str = yaml.dump(
        values, Dumper=_Dumper, default_flow_style=False, allow_unicode=True, sort_keys=False
    )
    return written


def key_of_own_name(name: str, schema: type) -> Key | None:
    """Return the key that takes a user's name, `role_mapping` for `role_mapping.judge`, or None."""
    keys = (key for key in config_keys(schema) if key.takes_any)
    return next((key for key in keys if name.startswith(f"{key.name}.")), None)
