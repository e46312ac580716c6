"""Compose the checked configuration of a recipe from settings: `load_config`.

Hydra composes the recipe's YAML, the chosen presets and the user's files. The settings are then put
into that tree, so that an error can name the setting. `as_object` makes it a dataclass, `settle`
returns the run's read-only configuration, and the checks look at the whole.
"""

from __future__ import annotations

import copy
import logging
import os
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from trainer.config.checks import check_fields, check_run
from trainer.config.keys import key_of_own_name, keys_by_name, value_at
from trainer.config.schema import Recipe, RunConfig
from trainer.config.settings import (
    as_text,
    flat_settings,
    keys_in,
    keys_of,
    keys_set,
    overrides_of,
    parse,
    reject_unknown,
)
from trainer.config.settle import settle
from verl_like.errors import ConfigError, nearest
from verl_like.masking import mask_with_name
from workers.config import EnvironmentConfig

C = TypeVar("C", bound=RunConfig)


def load_config(
    settings: Sequence[str] | Mapping[str, Any], recipe: Recipe[C], defaults: Sequence[str] = ()
) -> C:
    """Return a run's configuration from `key=value` strings, as on the command line, or a dict.

    A dict may have dotted names, or dicts within dicts. `defaults` are settings of lower priority,
    which get no notice if this run does not read them.
    """
    if isinstance(settings, str):
        raise ConfigError(f"{settings}: load_config takes a list, load_config([{settings!r}]).")
    if isinstance(settings, Mapping):
        settings = overrides_of(flat_settings(recipe.schema, settings))
    if not isinstance(settings, Sequence):
        raise ConfigError(f"load_config({settings!r}): pass a list of settings, or a dict.")
    config, notices = checked_config(settings, recipe, defaults)
    for notice in notices:
        logging.getLogger(__name__).warning(notice)
    return config


def checked_config(
    settings: Sequence[str], recipe: Recipe[C], defaults: Sequence[str] = ()
) -> tuple[C, list[str]]:
    """Compose, settle and check a configuration; return it with the notices to show."""
    parsed = known_settings(settings, recipe)
    tree = compose_tree([*known_settings(defaults, recipe), *parsed], recipe)
    composed = as_object(tree, recipe)
    check_fields(composed)
    config, notices = settle(recipe, composed, keys_set(parsed))
    check_run(config)
    warnings = [text for check in recipe.checks for text in check(config) or ()]
    return config, [*warnings, *notices]


def known_settings(settings: Sequence[str], recipe: Recipe[Any]) -> list[Override]:
    """Return the settings, translated to our keys.

    Reject unknown keys and presets, sweeps, and the deletion of a section.
    """
    full = [part for setting in settings for part in _in_full(parse(setting))]
    parsed = list(recipe.translate(full))
    reject_unknown(keys_of(parsed), recipe, files={})
    for setting in parsed:
        name, value = setting.key_or_group, setting.value()
        presets = recipe.preset_names(name)
        if setting.is_sweep_override():
            raise ConfigError(
                f"{setting.input_line}: several values are a sweep. Add --multirun for a sweep, "
                f"write a list as {name}=[1,2], or quote a text with commas."
            )
        if presets and isinstance(value, str | int | float) and value not in presets:
            keys = recipe.schema.pool_keys
            if name == "placement" and keys:
                raise ConfigError(
                    f"{name}={value}: `verl-like {recipe.name}` has its own pools. Leave out "
                    f"{name}, and set role_mapping, {keys}."
                )
            raise ConfigError(
                f"{name}={value}: there is no such preset.{nearest(str(value), presets)} Known: "
                f"{', '.join(presets)}."
            )
        key = keys_by_name(recipe.schema).get(name)
        if setting.is_delete() and key is not None and key.is_section and not presets:
            raise ConfigError(
                f"~{name}: this section cannot be removed, because its keys have defaults. Leave "
                f"out ~{name}."
            )
    return parsed


SHORT_FOR = {"environment": "environment.path", "tools": "environment.tools"}
"""The name of a section -> the key that is set if the section is set to a single value."""


def _in_full(setting: Override) -> list[Override]:
    """Return the settings that this setting abbreviates, or the setting itself."""
    value = setting.value()
    if setting.key_or_group == "reward" and isinstance(value, list):
        return [parse(f"reward.list={setting.get_value_string()}")]
    if setting.key_or_group == "reward" and isinstance(value, str):
        path, _, name = value.rpartition(":")
        function = {"path": path, "name": name} if path else {"path": value}
        return [parse(f"reward.function.{key}={part}") for key, part in function.items()]
    full = SHORT_FOR.get(setting.key_or_group)
    if full is None or setting.is_delete():
        return [setting]
    if isinstance(value, dict):
        is_section = value.keys() & {field.name for field in fields(EnvironmentConfig)}
        if is_section or not all(":" in str(path) for path in value.values()):
            return [setting]  # keys of the section, and not environments by name
        full = "environment.paths"
    return [parse(f"{full}={setting.get_value_string()}")]


def compose_tree(settings: Sequence[Override], recipe: Recipe[Any]) -> DictConfig:
    """Return the tree of known settings in the recipe's schema, not yet checked.

    A deleted key gets the schema's default again.
    """
    chosen = [setting for setting in settings if is_preset(setting, recipe)]
    lines = tuple(setting.input_line or "" for setting in chosen)
    tree = copy.deepcopy(tree_of_files(recipe, lines))
    known = keys_by_name(recipe.schema)
    for setting in settings:
        name, value = setting.key_or_group, setting.value()
        if setting in chosen:
            continue
        if setting.is_delete():
            defaults = recipe.schema()
            section, _, own_name = name.rpartition(".")
            if name in known:
                OmegaConf.update(tree, name, value_at(defaults, name), merge=False)
                continue
            OmegaConf.select(tree, section).pop(own_name, None)
            default = value_at(defaults, section) if section in known else {}
            if isinstance(default, dict) and own_name in default:
                OmegaConf.update(tree, name, default[own_name])
            continue
        around = key_of_own_name(name, recipe.schema)
        kind = known[name].kind if around is None else typing.get_args(around.kind)[-1]
        if typing.get_origin(kind) is list and isinstance(value, str | int):
            value = [value]
        if around is not None:  # OmegaConf builds these sections only from whole values
            for part in reversed(name.removeprefix(f"{around.name}.").split(".")):
                value = {part: value}
            name = around.name
        try:
            OmegaConf.update(tree, name, value, merge=True)
        except OmegaConfBaseException as err:
            from trainer.config.key_errors import wrong_value

            raise ConfigError(wrong_value(setting.input_line or "", err, recipe)) from err
    return tree


def is_preset(setting: Override, recipe: Recipe[Any]) -> bool:
    """Return whether a setting names a preset (`algorithm=grpo`, but not `algorithm={...}`)."""
    return setting.key_or_group in recipe.groups and not isinstance(setting.value(), dict)


def as_object(tree: DictConfig, recipe: Recipe[C]) -> C:
    """Return a tree as the recipe's dataclass, unchecked."""
    recipe.load_registries()
    try:
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as err:
        cause = err.__cause__ or err.__context__
        while cause is not None and not isinstance(cause, ConfigError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            from trainer.config.key_errors import unresolved_value

            cause = ConfigError(unresolved_value(err, recipe))
        raise cause from err
    assert isinstance(config, recipe.schema), f"the schema gave a {type(config).__name__}"
    return config


def _divide(number: int, parts: int) -> int:
    """Resolve `${divide:${data.max_response_length},5}`: rounded down, at least 1."""
    return max(number // parts, 1)


def _required(key: str, meaning: str) -> str:
    """Raise for `${required:KEY,MEANING}`, which a preset has until the user sets KEY."""
    raise ConfigError(f"{key} is not set, but the chosen preset needs it ({meaning}). Set {key}.")


def _environment(name: str, *default: str | None) -> str | None:
    """Resolve `oc.env` as OmegaConf does; messages show the variable's name, not its value."""
    if name in os.environ:
        mask_with_name(os.environ[name], f"${{oc.env:{name}}}")
    value: str | None = oc.env(name, *default)
    return value


OmegaConf.register_new_resolver("oc.env", _environment, replace=True)
OmegaConf.register_new_resolver("divide", _divide, replace=True)
OmegaConf.register_new_resolver("required", _required, replace=True)


@lru_cache(maxsize=64)
def tree_of_files(recipe: Recipe[Any], presets: tuple[str, ...]) -> DictConfig:
    """Compose the YAML files with Hydra: the recipe's, the presets', the user's."""
    first, *others = (folder.resolve() for folder in recipe.folders)
    path = f"hydra.searchpath={as_text([f'file://{folder}' for folder in others], 'searchpath')}"

    register(recipe, schema={})  # so that unknown keys of all files are reported together
    try:
        with initialize_config_dir(str(first), version_base="1.3"):
            composed = compose(recipe.config_name, overrides=[path, *presets])
    except HydraException as err:
        from trainer.config.key_errors import wrong_file

        raise ConfigError(wrong_file(err, [*_own_files(recipe)], recipe)) from err
    except yaml.MarkedYAMLError as err:
        file = err.problem_mark.name if err.problem_mark else recipe.config_name
        raise ConfigError(f"{file} is not readable as YAML: {err}") from err
    keys = keys_in("", OmegaConf.to_container(composed, resolve=False))
    reject_unknown(keys, recipe, _own_files(recipe))

    try:
        tree = OmegaConf.merge(OmegaConf.structured(recipe.schema), composed)
    except OmegaConfBaseException as err:
        from trainer.config.key_errors import wrong_value

        raise ConfigError(wrong_value(err.full_key or "", err, recipe)) from err
    assert isinstance(tree, DictConfig), "a schema is a mapping of keys"
    OmegaConf.set_struct(tree, None)  # the schema's sections stay closed, dicts take new names
    return tree


def _own_files(recipe: Recipe[Any]) -> dict[str, Path]:
    """Return the user's files by their names in `--config-name` and `defaults`."""
    folder = recipe.own_folder
    files = folder.rglob("*.yaml") if folder else ()
    return {str(file.relative_to(folder).with_suffix("")): file for file in files if folder}


def register(recipe: Recipe[Any], schema: Any) -> None:
    """Register the schema and the placement presets with Hydra, for the recipe's YAML.

    The store has one recipe at a time: presets of recipes share their names, and Hydra copies the
    whole store on each composition.
    """
    store = ConfigStore.instance()
    for name in [name for name in store.repo if name.endswith("_schema.yaml")]:
        del store.repo[name]
    store.repo.pop("placement", None)
    store.store(f"{recipe.name}_schema", schema)
    for preset, pools in recipe.placements.items():
        node = {
            "resource_pool_spec": {pool: [] for pool in pools},
            "role_mapping": {role: pool for pool, roles in pools.items() for role in roles},
        }
        store.store(group="placement", name=preset, package="_global_", node=node)
