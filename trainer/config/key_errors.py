"""Errors for settings with an unknown key or an invalid value."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

from trainer.config.keys import (
    KINDS,
    Key,
    config_keys,
    keys_by_name,
    known_arguments,
    leaf_keys,
    named_keys,
)
from trainer.config.schema import Recipe
from verl_like.errors import did_you_mean, nearest

SYNONYMS = {
    "n_gpus": "trainer.n_gpus_per_node",
    "num_gpus": "trainer.n_gpus_per_node",
    "max_new_tokens": "data.max_response_length",
}
"""Words of other libraries -> our key."""
OTHER_TYPE = re.compile(
    "Value .* could not be converted to|Value .* is not a valid bool|^Cannot .*"
)
"""Pattern of OmegaConf's message for a value of the wrong type."""


def wrong_file(err: HydraException, files: Sequence[str]) -> str:
    """Describe an error of Hydra in YAML files; `files` are the names of the user's files."""
    if isinstance(err, MissingConfigException) and err.missing_cfg_file:
        return f"{str(err).splitlines()[0]}{nearest(err.missing_cfg_file, files)}"
    return f"{err}: {_first_line(err.__cause__)}" if err.__cause__ else str(err)


def wrong_value(setting: str, err: OmegaConfBaseException, recipe: Recipe[Any]) -> str:
    """Describe a value of the wrong type, and the values that the key takes."""
    if isinstance(err, ConfigKeyError) and err.full_key:
        name = err.full_key
        for section in config_keys(recipe.schema):
            item_schema = section.item_schema
            if err.object_type is not None and item_schema == err.object_type:
                known = [key.name for key in config_keys(item_schema)]
                hint = nearest(name.rpartition(".")[2], known)
                return f"an item of {section.name} has no key {name!r}.{hint}"
        return no_such_key(name, recipe)
    setting = setting.lstrip("+")
    name, _, value = setting.partition("=")
    key, why = keys_by_name(recipe.schema).get(name), _first_line(err)
    if key is not None and key.is_section and not value.startswith("{"):
        below = [leaf for leaf in leaf_keys(recipe.schema) if leaf.name.startswith(f"{name}.")]
        example = next((leaf for leaf in below if leaf.rules.required), below[0])
        return f"{setting}: {name} is a section. Set one of its keys, such as {example.name}."
    item_schema = None if key is None else key.item_schema
    if err.object_type is not None and item_schema == err.object_type:
        why = f"{err.full_key}: {why}"
        key = keys_by_name(item_schema).get(err.full_key or "")
    allowed = "" if key is None else takes(key)
    if not allowed:
        return f"{setting}: {why.rstrip('.')}."
    if OTHER_TYPE.search(why):  # `takes` says more than OmegaConf's text
        return f"{setting}: {OTHER_TYPE.split(why)[0]}it {allowed}."
    return f"{setting}: {why.rstrip('.')}; it {allowed}."


def _first_line(err: BaseException) -> str:
    """Return OmegaConf's message; its other lines use OmegaConf's internal names."""
    return str(err).partition("\n")[0]


def takes(key: Key) -> str:
    """Describe the values that a key takes, by its type and rules; "" if these do not say."""
    kinds = [KINDS[kind] for kind in (key.kind, *typing.get_args(key.kind)) if kind in KINDS]
    allowed = key.allowed
    if key.range and kinds:
        allowed = f"{kinds[0]}, {allowed}"
    return f"takes {allowed or ' or '.join(kinds)}" if allowed or kinds else ""


def no_such_key(name: str, recipe: Recipe[Any]) -> str:
    """Return the error for an unknown key, with suggestions."""
    pools = {pool for preset in recipe.placements.values() for pool in preset}
    if name in pools:
        hint = f" Did you mean 'resource_pool_spec.{name}', the processes of that pool?"
    elif name.startswith("async_training."):
        hint = " It is a key of `verl-like async`."
    elif name == "rewards":
        hint = " Did you mean 'reward.list'?"
    elif name == "recipe":
        is_ppo = "algorithm" in recipe.groups
        hint = (
            f" The recipe is the command, here {recipe.name!r}; presets are chosen by "
            f"{', '.join(recipe.groups)}, as in "
            f"{'algorithm=coati_legacy' if is_ppo else 'placement=split'}."
        )
    elif above := _key_above(name, recipe):
        hint = f" {above.name} has no keys below it; it {takes(above)}."
    else:
        keys = [*named_keys(recipe.schema).values()]
        recipe.load_registries()
        keys += known_arguments(recipe.schema)
        hint = _did_you_mean(name, keys, recipe.groups)
    return f"there is no key {name!r}.{hint}"


def _key_above(name: str, recipe: Recipe[Any]) -> Key | None:
    """Return the key that the name goes below, `reward.list` for `reward.list.name`, or None."""
    known = keys_by_name(recipe.schema)
    while "." in name:
        name = name.rpartition(".")[0]
        key = known.get(name)
        if key is not None and not key.is_section and takes(key):
            return key
    return None


def _did_you_mean(name: str, keys: Sequence[Key], groups: Sequence[str]) -> str:
    """Suggest the key with this name in verl, keys with the same last word, or the nearest name."""
    names = {key.name for key in keys}
    renamed = {
        key.name + name.removeprefix(key.rules.verl)
        for key in keys
        if key.rules.verl and f"{name}.".startswith(f"{key.rules.verl}.")
    }
    ours = renamed & names
    if ours:
        return f" Here it is {min(ours)!r}."

    leaf = name.rpartition(".")[2]
    if SYNONYMS.get(leaf) in names:
        return did_you_mean([SYNONYMS[leaf]])
    last_words = [(key.name, key.name.rpartition(".")[2]) for key in keys]
    twins = [known for known, last in last_words if last == leaf]
    # `epochs` is a word of `total_epochs`
    twins = twins or [known for known, last in last_words if leaf in last.split("_")][:3]
    if twins:
        return did_you_mean(twins)
    similar = difflib.get_close_matches(leaf, {last for _, last in last_words}, n=1)
    of_similar_words = [known for known, last in last_words if last in similar][:3]
    return nearest(name, [*(key.name for key in keys), *groups]) or did_you_mean(of_similar_words)
