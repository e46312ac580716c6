"""Valid keys that this run does not read.

A key declares at its field when it is read (`read_when`). A condition of a section covers all its
keys. A key that the user set and that this run does not read is a notice, never an error, because
people switch estimators and keep their scripts. `--cfg job` prints only the keys that the run
reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from textwrap import wrap
from typing import Any

from omegaconf import DictConfig, OmegaConf

from trainer.config.keys import (
    Arguments,
    Key,
    field_docs,
    keys_by_name,
    leaf_keys,
    leaves_of_items,
    named_keys,
    path_to,
    read,
)
from trainer.config.schema import RunConfig


def notice_of(names: Collection[str], reason: str) -> str:
    """Return the notice that these keys have no effect."""
    verb = "has" if len(names) == 1 else "have"
    return f"note: {', '.join(names)} {verb} no effect: {reason}"


def unused_in_items(config: RunConfig, keys: Iterable[str]) -> Iterator[str]:
    """Yield notices of unused keys that the user set in items, such as `reward.list[0].retries`."""
    sections = {name.partition(".")[0] for name in keys}
    for key, section in leaves_of_items(config):
        if key.name.partition(".")[0].partition("[")[0] in sections:
            is_set = getattr(section, key.leaf) != getattr(type(section)(), key.leaf)
            for condition in key.rules.read_when if is_set else ():
                if not condition.holds(section, config):
                    yield notice_of([key.name], condition.missing(key.section, config))
                    break


def unused_reason(config: RunConfig, name: str) -> str | None:
    """Return why the run does not read the key `name`, or None if it does."""
    for key in path_to(type(config), name):
        if key.is_section and key.name == name:
            continue  # such as `critic={}`, which sets no key
        section = read(config, key.section)
        for condition in key.rules.read_when:
            if not condition.holds(section, config):
                return condition.missing(key.section, config)
        if key.rules.arguments_of and name != key.name:
            arguments = Arguments.of(key, section)
            argument = name.removeprefix(f"{key.name}.")
            if argument not in arguments.taken:
                return f"the {arguments.kind} of this run does not accept {argument}"
    return None


def keys_left_out(config: RunConfig) -> set[str]:
    """Return the keys that this run does not read, which `--cfg job` leaves out."""
    names = [key.name for key in leaf_keys(type(config))]
    return {name for name in names if unused_reason(config, name) is not None}


def without_keys(
    tree: Mapping[Any, Any], left_out: Collection[str], prefix: str = ""
) -> dict[Any, Any]:
    """Return the tree without these keys and without the sections that become empty.

    `prefix` is the place of `tree` in the whole tree: "", or a section's name and a dot.
    """
    result = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in left_out:
            continue
        if not any(dotted.startswith(f"{key}.") for dotted in left_out):
            result[name] = value
        elif below := without_keys(value, left_out, f"{key}."):
            result[name] = below
    return result


INDENT, WIDTH = "  ", 100


def annotated_yaml(
    composed: DictConfig,
    schema: type,
    resolve: bool = False,
    left_out: Collection[str] = (),
    meanings: bool = False,
) -> str:
    """Return the tree in the order of its composition, with the rules of each field as a comment.

    A comment that is too long for its line is above it. `left_out` keys are only counted at the
    end. With `meanings`, the lines above a key begin with its meaning, and the keys of a section
    that are not set are comments.
    """
    keys = named_keys(schema) if meanings else keys_by_name(schema)
    tree = OmegaConf.to_container(composed, resolve=resolve, enum_to_str=True)
    assert isinstance(tree, dict), "the root of a configuration is a mapping"
    docs = dict(field_docs(schema)) if meanings else {}
    for key in leaf_keys(schema) if meanings else ():
        if key.rules.options is not None:
            docs |= field_docs(key.rules.options, f"{key.name}.")
    lines = [*_lines(without_keys(tree, left_out), "", keys, docs)]
    if left_out:
        lines.append(
            f"# {len(left_out)} more keys have no effect in this run; show them with --cfg all"
        )
    return "\n".join(lines) + "\n"


def _lines(
    section: dict[Any, Any], prefix: str, keys: Mapping[str, Key], docs: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of the keys below a section, each indented by its depth."""
    indent = INDENT * prefix.count(".")
    for name, value in section.items():
        key = keys.get(f"{prefix}{name}")
        rules = "" if key is None else key.describe_rules
        options = key.rules.options if docs and key is not None else None
        has_keys = key is not None and (key.is_section or options is not None)
        is_section = has_keys and isinstance(value, dict)
        entry = (
            [f"{name}:"] if is_section and value else OmegaConf.to_yaml({name: value}).splitlines()
        )
        first, *rest = [f"{indent}{line}" for line in entry]
        with_rules = f"{first}  # {rules}" if rules else first
        # a block value allows no comment on its first line
        is_above = bool(rules) and (bool(rest) or len(with_rules) > WIDTH)

        for text in (docs.get(f"{prefix}{name}", ""), rules if is_above else ""):
            width = WIDTH - len(indent) - len("# ")
            words = " ".join(text.split())
            lines = wrap(words, width, break_long_words=False, break_on_hyphens=False)
            yield from (f"{indent}# {line}" for line in lines)
        yield from (first if is_above else with_rules, *rest)
        if is_section:
            below = f"{prefix}{name}."
            yield from _lines(value, below, keys, docs)
            defaults = asdict(options()) if options else {}
            unset = {name: default for name, default in defaults.items() if name not in value}
            for line in _lines(unset, below, keys, docs):
                is_comment = line.lstrip().startswith("#")
                yield line if is_comment else f"{indent}{INDENT}# {line.strip()}"
