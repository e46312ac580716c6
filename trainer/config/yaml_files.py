"""Compose the YAML files of a recipe with Hydra: the recipe's, the presets', the user's."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc

from trainer.config.recipe import Recipe
from trainer.config.settings import as_text, keys_in, reject_unknown
from verl_like.errors import ConfigError
from verl_like.masking import mask_with_name


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

        raise ConfigError(wrong_file(err, [*_own_files(recipe)])) from err
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
