"""Errors for settings with an unknown key or an invalid value."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Sequence
from typing import Any

from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import (
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    InterpolationToMissingValueError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from trainer.config.keys import (
    KINDS,
    Key,
    config_keys,
    key_of_own_name,
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


def wrong_file(err: HydraException, files: Sequence[str], recipe: Recipe[Any]) -> str:
    """Describe an error of Hydra in YAML files; `files` are the names of the user's files."""
    if isinstance(err, MissingConfigException) and err.missing_cfg_file:
        return f"{str(err).splitlines()[0]}{nearest(err.missing_cfg_file, files)}"
    cause, text = err.__cause__, str(err)
    if isinstance(cause, OmegaConfBaseException):
        why = unresolved_value(cause, recipe)
        return f"{text}: {why}" if text else why
    return f"{text}: {str(cause).splitlines()[0]}" if cause else text


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
    key = keys_by_name(recipe.schema).get(name)
    if key is not None and key.is_section and not value.startswith("{"):
        below = [leaf for leaf in leaf_keys(recipe.schema) if leaf.name.startswith(f"{name}.")]
        example = next((leaf for leaf in below if leaf.rules.required), below[0])
        return f"{setting}: {name} is a section. Set one of its keys, such as {example.name}."
    place, key = _key_of_error(name, err, recipe)
    return f"{setting}: {f'{place}: ' if place else ''}{reason(err, key, recipe)}"


def unresolved_value(err: OmegaConfBaseException, recipe: Recipe[Any]) -> str:
    """Describe a value of the whole configuration that is missing, or whose reference fails."""
    name = err.full_key or ""
    return f"{name}: {reason(err, _key_of_error(name, err, recipe)[1], recipe)}"


def _key_of_error(
    name: str, err: OmegaConfBaseException, recipe: Recipe[Any]
) -> tuple[str, Key | None]:
    """Return the place of a wrong value below the key `name` ("" for the key), and its key."""
    known, full = keys_by_name(recipe.schema), err.full_key or ""
    key = known.get(name) or key_of_own_name(name, recipe.schema)
    item_schema = None if key is None else key.item_schema
    if err.object_type is not None and item_schema == err.object_type:
        leaf = full.rpartition(".")[2]
        return "" if full == name else leaf, keys_by_name(item_schema).get(leaf)
    inner = known.get(full)
    if inner is not None and inner != key:
        return full, inner
    return key.name if key is not None and key.name != name else "", key


REFERS = re.compile(r"Interpolation key '(?P<key>.*)' not found")
"""OmegaConf's message for a reference to a key that does not exist."""
RESOLVER = re.compile(r"Unsupported interpolation type (?P<name>.+)")
"""OmegaConf's message for a resolver that does not exist."""
VARIABLE = re.compile(r"Environment variable '(?P<name>.*)' not found")
"""OmegaConf's message for an environment variable that is not set."""
DEREFERENCED = re.compile(r"While dereferencing interpolation '(?P<reference>.*?)':")
"""OmegaConf's message for a reference to a value of another type."""


def reason(err: OmegaConfBaseException, key: Key | None, recipe: Recipe[Any]) -> str:
    """Return in our words what OmegaConf rejects, and the way out; `key` is the key, if known."""
    text = str(err).partition("\n")[0]  # the other lines use OmegaConf's internal names
    allowed = "" if key is None else takes(key)
    remedy = f"; it {allowed}." if allowed else "."
    if isinstance(err, MissingMandatoryValue):
        return f"??? stands for a value that you must set{remedy}"
    if found := REFERS.search(text):
        hint = nearest(found["key"], keys_by_name(recipe.schema))
        return f"it refers to ${{{found['key']}}}, but there is no such key.{hint}"
    if found := RESOLVER.search(text):
        return (
            f"${{{found['name']}:...}} is not known. Refer to a key, as in ${{trainer.seed}}, or "
            "to an environment variable, as in ${oc.env:NAME}."
        )
    if found := VARIABLE.search(text):
        name = found["name"]
        return (
            f"the environment variable {name} is not set. Set it, or add a default: "
            f"${{oc.env:{name},DEFAULT}}."
        )
    if "Recursive interpolation" in text:
        return "its reference leads back to itself. Set one of the keys in this circle to a value."
    if isinstance(err, InterpolationToMissingValueError):
        return "it refers to a key without a value. Set that key."
    if found := DEREFERENCED.search(text):
        return f"the value of {found['reference']} does not fit{remedy}"
    if isinstance(err, GrammarParseError):
        return "a reference is not complete. Write it as ${KEY}, or \\${ for a plain ${."
    if isinstance(err, InterpolationResolutionError):
        return f"its reference cannot be resolved ({text.rstrip('.')}). Set a value."
    if allowed:  # this says more than OmegaConf's text
        return f"it {allowed}."
    kinds = [KINDS[kind] for kind in (err.ref_type,) if kind in KINDS]
    return f"it takes {kinds[0]}." if kinds else "the value has another type than the key."


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
