"""Keys that are valid, but that this run does not read.

A key declares at its field when it is read (`read_when`). A condition of a section covers all its
keys. A key that the user set and that this run does not read is a notice, never an error, because
people switch estimators and keep their scripts. `--cfg job` prints only the keys that the run
reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from trainer.config.keys import (
    Arguments,
    Key,
    config_keys,
    leaf_keys,
    leaves_of_items,
    path_to,
    read,
)
from trainer.config.schema import RunConfig


def unused_among(config: RunConfig, keys: Collection[str]) -> dict[str, list[str]]:
    """Return reason -> the user's `keys` that this run does not read."""
    unused: dict[str, list[str]] = {}
    for key in keys:
        reason = why_unused(config, key)
        if reason is not None:
            unused.setdefault(reason, []).append(key)
    return unused


def notice_of(names: Collection[str], reason: str) -> str:
    """Return the notice that these keys have no effect."""
    verb = "has" if len(names) == 1 else "have"
    return f"notice: {', '.join(names)} {verb} no effect: {reason}"


def unused_in_items(config: RunConfig, keys: Iterable[str]) -> Iterator[str]:
    """Yield notices of keys such as `rewards[0].retries` in the lists that the user set."""
    sections = {name.partition(".")[0] for name in keys}
    for key, section in leaves_of_items(config):
        if key.name.partition(".")[0].partition("[")[0] in sections:
            is_set = getattr(section, key.leaf) != getattr(type(section)(), key.leaf)
            reason = _missing(key, section, config) if is_set else None
            if reason is not None:
                yield notice_of([key.name], reason)


def why_unused(config: RunConfig, name: str) -> str | None:
    """Return why the run does not read the key `name`, or None if it does."""
    for key in path_to(type(config), name):
        if key.is_section and key.name == name:
            continue  # `critic={}` sets no key
        reason = _missing_for(config, key)
        if reason is not None:
            return reason
        if key.rules.arguments_of and name != key.name:
            arguments = Arguments.of(key, read(config, key.section))
            argument = name.removeprefix(f"{key.name}.")
            if argument not in arguments.taken:
                return f"the {arguments.kind} of this run does not take {argument}"
    return None


def unused_keys(config: RunConfig) -> dict[str, list[str]]:
    """Return reason -> the keys and whole sections that this run does not read."""
    unused: dict[str, list[str]] = {}
    unused_sections: tuple[str, ...] = ()

    for key in config_keys(type(config)):
        if key.name.startswith(unused_sections):
            continue
        reason = _missing_for(config, key)
        if reason is None:
            continue

        unused.setdefault(reason, []).append(key.name)
        if key.is_section:
            unused_sections += (f"{key.name}.",)
    return unused


def keys_left_out(config: RunConfig) -> set[str]:
    """Return the keys that this run does not read, which `--cfg job` leaves out."""
    names = [key.name for key in leaf_keys(type(config))]
    return {name for name in names if why_unused(config, name) is not None}


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


def _missing_for(config: RunConfig, key: Key) -> str | None:
    return _missing(key, read(config, key.section), config)


def _missing(key: Key, section: Any, config: RunConfig) -> str | None:
    for condition in key.rules.read_when:
        if not condition.holds(section, config):
            return condition.missing(key.section)
    return None
