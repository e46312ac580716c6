"""What is wrong with a setting that names no key, or has no value of its key: in words.

Also what Hydra refuses, whose own words name its files.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import ConfigKeyError

from trainer.config.keys import Key, config_keys, keys_by_name
from trainer.config.own_files import OwnFiles
from trainer.config.recipe import Recipe
from trainer.config.tree import parse
from verl_like.errors import nearest

MERGING = "Error merging override "
"""How Hydra begins where a value is not of its key's type."""
KINDS: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text"}
"""Type of a key -> its values."""


def in_words(err: HydraException, recipe: Recipe[Any], own: OwnFiles | None = None) -> str:
    """What Hydra refuses; of an unknown key in a YAML file, or an unknown file, the nearest ones.

    `own` are the user's files.
    """
    if isinstance(err, MissingConfigException) and err.missing_cfg_file and own is not None:
        return f"{str(err).splitlines()[0]}{nearest(err.missing_cfg_file, own.names())}"

    cause: BaseException | None = err
    while cause is not None and not isinstance(cause, ConfigKeyError):
        cause = cause.__cause__ or cause.__context__
    if cause is None or not cause.full_key:
        return _wrong_value(err, recipe)
    where = re.match(r"In '[^']*': ", str(err))
    section = _section_of_items(cause.object_type, recipe)
    refusal = (
        no_such_key(cause.full_key, recipe)
        if section is None
        else _no_such_item_key(cause.full_key, section)
    )
    return (where[0] if where else "") + refusal


def _section_of_items(schema: Any, recipe: Recipe[Any]) -> Key | None:
    """The key whose value is a list of sections with this schema."""
    keys = config_keys(recipe.schema)
    return next((key for key in keys if key.item_schema and key.item_schema is schema), None)


def _no_such_item_key(name: str, section: Key) -> str:
    assert section.item_schema is not None, "it was found by that"
    known = [key.name for key in config_keys(section.item_schema)]
    return f"An item of {section.name} has no key {name!r}.{nearest(name, known)}"


def _wrong_value(err: HydraException, recipe: Recipe[Any]) -> str:
    """A value that is not of its key's type, and what the key takes."""
    why = str(err.__cause__).partition("\n")[0]  # the rest are OmegaConf's own names
    if not err.__cause__ or not str(err).startswith(MERGING):
        return f"{err}: {why}" if err.__cause__ else str(err)
    override = str(err).removeprefix(MERGING).lstrip("+")
    key = keys_by_name(recipe.schema).get(override.partition("=")[0])
    item_schema = None if key is None else key.item_schema
    of_object = getattr(err.__cause__, "object_type", None)
    if item_schema is not None and item_schema == of_object:
        name = getattr(err.__cause__, "full_key", "")
        key, why = keys_by_name(item_schema).get(name), f"{name}: {why}"
    hint = "" if key is None else f"; it {takes(key)}" if takes(key) else ""
    return f"{override}: {why.rstrip('.')}{hint}."


def takes(key: Key) -> str:
    """What a key takes, with its range; "" where its type says all."""
    kinds = [KINDS[kind] for kind in (key.kind, *typing.get_args(key.kind)) if kind in KINDS]
    allowed = key.allowed
    if key.range and kinds:
        allowed = f"{kinds[0]}, {allowed}"
    return f"takes {allowed or ' or '.join(kinds)}" if allowed or kinds else ""


def unreadable(err: HydraException, overrides: Sequence[str]) -> str:
    """A setting that Hydra's grammar does not allow, and how it would be."""
    for override in overrides:
        try:
            parse(override)
        except HydraException:
            name = override.partition("=")[0]
            return (
                f"{override} cannot be read as a setting. A text with other signs than letters, "
                f"digits and /-\\+.$%*@?| in it is quoted, within the quotes for the shell: "
                f"\"{name}='...'\". A list is [1, 2], a dict {{name: 1}}."
            )
    return str(err)


def no_such_key(name: str, recipe: Recipe[Any]) -> str:
    """A refusal of a key, with those that it may have been meant for."""
    pools = {pool for preset in recipe.placements.values() for pool in preset}
    if name in pools:
        hint = f" Did you mean 'resource_pool_spec.{name}', the processes of that pool?"
    elif name in recipe.no_keys:
        hint = f" {recipe.no_keys[name]}"
    elif above := _key_above(name, recipe):
        hint = f" {above.name} has no keys below it; it {takes(above)}."
    else:
        hint = _did_you_mean(name, config_keys(recipe.schema), recipe.groups)
    return f"There is no key {name!r}.{hint}"


def _key_above(name: str, recipe: Recipe[Any]) -> Key | None:
    """The key that a name goes on from, as `rewards` in `rewards.name`, which holds a value."""
    known = keys_by_name(recipe.schema)
    while "." in name:
        name = name.rpartition(".")[0]
        key = known.get(name)
        if key is not None and not key.is_section and takes(key):
            return key
    return None


def _did_you_mean(name: str, keys: Sequence[Key], groups: Sequence[str]) -> str:
    """The key with verl's name, else those with the same last word, else the nearest one or group
    of presets.
    """
    ours = [key.name for key in keys if name and key.rules.verl == name]
    if ours:
        return f" Here it is {ours[0]!r}."

    leaf = name.rpartition(".")[2]
    last_words = [(key.name, key.name.rpartition(".")[2]) for key in keys]
    twins = [known for known, last in last_words if last == leaf]
    # `epochs` is a word of `total_epochs`
    twins = twins or [known for known, last in last_words if leaf in last.split("_")][:3]
    if twins:
        return f" Did you mean {' or '.join(map(repr, twins))}?"
    return nearest(name, [*(key.name for key in keys), *groups])
