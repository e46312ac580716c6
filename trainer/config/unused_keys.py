"""Keys that nothing reads in this run: an error where the user set them.

When a key is read stands at its field (`read_when`); a condition of a section covers all of it.
The tree of a run, as `--cfg job` prints it, has the keys that it reads, however many its schema
knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from trainer.config.keys import Key, config_keys, leaf_keys, path_to, read
from trainer.config.schema import RunConfig
from verl_like.errors import ConfigError


def check_unused(config: RunConfig, keys: Iterable[str]) -> None:
    """Refuse those of the user's `keys` that nothing reads, all at once."""
    unread: dict[str, list[str]] = {}
    for key in keys:
        reason = why_unused(config, key)
        if reason is not None:
            unread.setdefault(reason, []).append(key)
    if not unread:
        return

    lines = []
    for reason, of_reason in unread.items():
        verb, them = ("are", "them") if of_reason[1:] else ("is", "it")
        names = ", ".join(of_reason)
        lines.append(f"{names} {verb} set, but nothing reads {them} in this run: {reason}.")
    taken_back = " ".join(f"~{key}" for of_reason in unread.values() for key in of_reason)
    lines.append(
        f"Drop what nothing reads, or take it back behind it, {taken_back}, or change that."
    )
    raise ConfigError("\n".join(lines) if lines[2:] else " ".join(lines))


def why_unused(config: RunConfig, name: str) -> str | None:
    """What is missing for the key `name` to be read; None if it is read."""
    for key in path_to(type(config), name):
        if key.is_section and key.name == name:
            continue  # `critic={}` sets no key
        reason = _missing_for(config, key)
        if reason is not None:
            return reason
    return None


def unused_keys(config: RunConfig) -> dict[str, list[str]]:
    """Reason -> the keys and whole sections that nothing reads for it."""
    found: dict[str, list[str]] = {}
    unused_sections: tuple[str, ...] = ()

    for key in config_keys(type(config)):
        if key.name.startswith(unused_sections):
            continue
        reason = _missing_for(config, key)
        if reason is None:
            continue

        found.setdefault(reason, []).append(key.name)
        if key.is_section:
            unused_sections += (f"{key.name}.",)
    return found


def keys_left_out(config: RunConfig) -> set[str]:
    """The keys that a run's tree leaves out: those that nothing reads."""
    names = [key.name for key in leaf_keys(type(config))]
    return {name for name in names if why_unused(config, name) is not None}


def without_keys(
    tree: Mapping[Any, Any], left_out: Collection[str], prefix: str = ""
) -> dict[Any, Any]:
    """A tree without these keys, and without the sections that held no others.

    `prefix` is where in the whole tree it stands: "", or the name of a section and a dot.
    """
    kept = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in left_out:
            continue
        if not any(each.startswith(f"{key}.") for each in left_out):
            kept[name] = value
        elif below := without_keys(value, left_out, f"{key}."):
            kept[name] = below
    return kept


def _missing_for(config: RunConfig, key: Key) -> str | None:
    name = key.name.rpartition(".")[0]
    section = read(config, name)
    for condition in key.rules.read_when:
        if not condition.holds(section, config):
            return condition.missing(name)
    return None
