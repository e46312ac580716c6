"""From command-line overrides to the checked configuration of a recipe.

`load_config` is the way in for code and tests. A program around Hydra's main, which composes by
itself, calls `register`, `prepare_overrides` and `from_composed`.
"""

from __future__ import annotations

import copy
import logging
import os
import re
import sys
import typing
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.checks import check_fields, check_pool_resources, check_pool_sizes, check_resume
from trainer.config.keys import Key, config_keys, keys_by_name
from trainer.config.own_files import OwnFiles
from trainer.config.placement import expand_shorthands, preset_tree, settle, settle_names
from trainer.config.possible_faults import check_chaos
from trainer.config.recipe import Recipe
from trainer.config.refusals import in_words, no_such_key, unreadable
from trainer.config.schema import RunConfig
from trainer.config.settings import flat_settings, overrides_of
from trainer.config.shares import share
from trainer.config.tree import compose_tree_of, into_schema, parse, schema_node
from trainer.config.unused_keys import check_unused, keys_left_out
from verl_like.errors import ConfigError, nearest
from verl_like.process.environment import is_under_torchrun

C = TypeVar("C", bound=RunConfig)
_registered: dict[str, Recipe[Any]] = {}


def _share(name: str, pool: str, preset_pools: Sequence[str], *, _root_: DictConfig) -> list[int]:
    """`${share:<recipe>,<pool>,[<pools of the preset>]}`."""
    return share(_registered[name], pool, preset_pools, _root_)


def _divide(number: int, parts: int) -> int:
    """`${divide:${data.max_response_length},5}`: rounded down, at least 1."""
    return max(number // parts, 1)


def _required(key: str, what: str) -> str:
    """`${required:distillation.teacher_model.model_path,the teacher's folder}`, of a preset."""
    raise ConfigError(f"{key} is not set, and the preset that was chosen needs it: {what}.")


OmegaConf.register_new_resolver("share", _share, replace=True)
OmegaConf.register_new_resolver("divide", _divide, replace=True)
OmegaConf.register_new_resolver("required", _required, replace=True)


def register(recipe: Recipe[Any]) -> None:
    """Let Hydra find the schema and the placement presets that the recipe's YAML names.

    Those of the last recipe alone are there: presets of recipes share their names, and Hydra copies
    all that is stored each time that it composes.
    """
    store = ConfigStore.instance()
    presets = store.repo.get("placement", {})
    names = [f"{preset}.yaml" for preset in recipe.placements]
    are_stored = all(name in presets and presets[name].provider == recipe.name for name in names)
    is_stored = f"{_schema_name(recipe)}.yaml" in store.repo and are_stored
    if is_stored and _registered.get(recipe.name) is recipe:
        return

    for other in _registered.values():
        store.repo.pop(f"{_schema_name(other)}.yaml", None)
    _registered[recipe.name] = recipe
    store.store(name=_schema_name(recipe), node=schema_node(recipe))
    for preset in recipe.placements:
        store.store(
            group="placement",
            name=preset,
            package="_global_",
            node=preset_tree(recipe, preset),
            provider=recipe.name,
        )


def _schema_name(recipe: Recipe[Any]) -> str:
    return f"{recipe.name}_schema"


def load_config(overrides: Sequence[str] | Mapping[str, Any], recipe: Recipe[C]) -> C:
    """`key=value` strings, as on the command line, or a dict of keys -> a run's configuration.

    Names in a dict are dotted, or dicts within dicts.
    """
    if isinstance(overrides, Mapping):
        overrides = overrides_of(flat_settings(recipe.schema, overrides))
    overrides = prepare_overrides(overrides, recipe)
    return _checked(compose_tree(overrides, recipe), overrides, recipe)


def compose_tree(overrides: Sequence[str], recipe: Recipe[Any]) -> DictConfig:
    """The tree of prepared overrides in the recipe's schema, not yet checked."""
    register(recipe)
    try:
        return compose_tree_of(recipe, overrides)
    except HydraException as err:
        raise ConfigError(in_words(err, recipe)) from err
    except OmegaConfBaseException as err:
        raise ConfigError(str(err)) from err


def prepare_overrides(
    overrides: Sequence[str], recipe: Recipe[Any], own: OwnFiles | None = None
) -> list[str]:
    """What Hydra gets: keys are known, shorthands written out, own names take no `+`.

    `own` are further YAML files, of the user's.
    """
    overrides = add_torchrun(expand_shorthands(recipe, recipe.translate(overrides)))
    check_overrides(overrides, recipe, own)
    _check_presets(overrides, recipe, own)
    overrides = [_as_list(override, recipe) for override in overrides]

    takes_any = [key for key in config_keys(recipe.schema) if key.takes_any]
    of_sections = tuple(f"{key.name}." for key in takes_any if key.item_schema)
    written = [_in_braces(o) if o.startswith(of_sections) else o for o in overrides]
    own_names = tuple(key.name + sign for key in takes_any for sign in ".=")
    return [f"++{o}" if o.startswith(own_names) else o for o in written]


def _in_braces(override: str) -> str:
    """`pool_resources.a.cpus=1` as `pool_resources={a: {cpus: 1}}`.

    OmegaConf makes sections with names of the user's own of whole values alone.
    """
    name, _, value = override.partition("=")
    section, *names = name.split(".")
    for part in reversed(names):
        value = f"{{{part}: {value}}}"
    return f"{section}={value}"


def add_torchrun(overrides: Sequence[str]) -> list[str]:
    """In a process that torchrun started, its backend and its number of processes.

    What the user set stays; with another backend so does all else.
    """
    keys = override_keys(overrides)
    others = [o for o in overrides if o.startswith("trainer.backend=") and "torchrun" not in o]
    if not is_under_torchrun() or others:
        return list(overrides)
    decided = {
        "trainer.backend": "torchrun",
        "trainer.n_gpus_per_node": os.environ["LOCAL_WORLD_SIZE"],
    }
    more = [f"{name}={value}" for name, value in decided.items() if name not in keys]
    return [*overrides, *more]


def check_overrides(
    overrides: Sequence[str], recipe: Recipe[Any], own: OwnFiles | None = None
) -> None:
    """Refuse keys that do not exist; Hydra would let `+section.typo=` through.

    Those of the user's files are among them.
    """
    unknown = []
    for name in override_keys(overrides):
        unknown += _unknown(name, recipe)
    _refuse_deleted_sections(overrides, recipe)
    for file, name in () if own is None else own.keys(overrides):
        unknown += [f"In '{file}': {refusal}" for refusal in _unknown(name, recipe)]
    if unknown:
        apart = " " if len(unknown) == 1 else "\n"
        raise ConfigError(apart.join([*unknown, f"All keys: verl-like {recipe.name} --cfg all"]))


def _refuse_deleted_sections(overrides: Sequence[str], recipe: Recipe[Any]) -> None:
    """Refuse `~trainer`: every run has its sections."""
    for override in map(parse, overrides):
        name = override.key_or_group
        key = keys_by_name(recipe.schema).get(name)
        is_section = key is not None and key.is_section and name not in recipe.groups
        if override.is_delete() and is_section:
            raise ConfigError(
                f"~{name}: every run has this section, whose keys have their defaults where you "
                "set none. Leave it out."
            )


def _unknown(name: str, recipe: Recipe[Any]) -> list[str]:
    """A refusal of a key, if there is none of that name."""
    keys = config_keys(recipe.schema)
    own_names = tuple(f"{key.name}." for key in keys if key.takes_any)
    of_hydra = name.split(".")[0].split("/")[0] == "hydra"
    is_known = name in keys_by_name(recipe.schema) or name.startswith(own_names)
    if not (is_known or of_hydra or name in recipe.groups):
        return [no_such_key(name, recipe)]
    return _unknown_in_sections(name, keys)


def _unknown_in_sections(name: str, keys: Sequence[Key]) -> list[str]:
    """A refusal of `pool_resources.a.cpu`: sections that the user names have keys of a schema."""
    for section in keys:
        if not (section.takes_any and section.item_schema and name.startswith(f"{section.name}.")):
            continue
        own_name, _, rest = name.removeprefix(f"{section.name}.").partition(".")
        known = [key.name for key in config_keys(section.item_schema)]
        if rest and rest.partition(".")[0] not in known:
            has = f" {section.name}.{own_name} has {', '.join(known)}."
            return [f"There is no key {name!r}.{nearest(rest, known)}{has}"]
    return []


def _as_list(override: str, recipe: Recipe[Any]) -> str:
    """The override with brackets around its one value, where the key takes a list."""
    parsed = parse(override)
    key, value = parsed.key_or_group, parsed.value()
    if parsed.is_delete() or parsed.is_sweep_override() or not isinstance(value, str | int):
        return override
    is_size = key.startswith("resource_pool_spec.")
    found = keys_by_name(recipe.schema).get(key)
    if not is_size and not (found and typing.get_origin(found.kind) is list):
        return override
    name, _, text = override.partition("=")
    return f"{name}=[{text}]"


def _check_presets(overrides: Sequence[str], recipe: Recipe[Any], own: OwnFiles | None) -> None:
    """Refuse names of presets that there are not; Hydra would show its search path."""
    for override in overrides:
        group, _, name = override.partition("=")
        presets = recipe.preset_names(group) + (own.presets(group) if own is not None else [])
        is_one_name = re.fullmatch(r"[\w+-]+", name) is not None
        if presets and is_one_name and name != "null" and name not in presets:
            raise ConfigError(
                f"{group}={name}: there is no such preset; there are {', '.join(presets)}."
                f"{nearest(name, presets)}"
            )


def override_keys(overrides: Sequence[str]) -> list[str]:
    """The dotted keys that `overrides` set, add or delete, also inside `section={key: value}`."""
    try:
        parsed = [parse(override) for override in overrides]
    except HydraException as err:
        raise ConfigError(unreadable(err, overrides)) from err

    found = []
    for override in parsed:
        found += _keys_in(override.key_or_group, override.value())
    return found


def _keys_in(key: str, value: Any) -> list[str]:
    if not isinstance(value, dict) or not value:
        return [key]

    found = []
    for name, inner in value.items():
        found += _keys_in(f"{key}.{name}", inner)
    return found


def from_composed(composed: DictConfig, overrides: Sequence[str], recipe: Recipe[C]) -> C:
    """Hydra's tree merged back into the schema, resolved, settled and checked."""
    try:
        tree = into_schema(recipe, composed)
    except OmegaConfBaseException as err:
        raise ConfigError(str(err)) from err
    return _checked(tree, overrides, recipe)


def _checked(tree: DictConfig, overrides: Sequence[str], recipe: Recipe[C]) -> C:
    """A tree of the recipe's schema, which is changed, resolved, settled and checked."""
    keys = override_keys(overrides)
    config, notices = _settled(tree, keys, recipe)

    check_fields(config)
    check_resume(config)
    check_pool_sizes(config)
    check_pool_resources(config)
    check_chaos(config)
    for check in recipe.checks:
        check(config)

    for notice in notices + check_unused(config, keys, recipe.only_noticed):
        logging.getLogger(__name__).warning(notice)
    return config


def _settled(tree: DictConfig, keys: Sequence[str], recipe: Recipe[C]) -> tuple[C, list[str]]:
    """A tree, which is changed, as a configuration that nobody has checked, and its notices."""
    recipe.load_registries()
    try:
        settle_names(tree, keys)
        config = OmegaConf.to_object(tree)
    except OmegaConfBaseException as err:
        raise _our_own(err) or ConfigError(str(err)) from err
    assert isinstance(config, recipe.schema), f"the schema gave a {type(config).__name__}"

    notices = [*recipe.complete(config, keys), *settle(recipe, config, keys)]
    return config, notices


def left_out_of(tree: DictConfig, overrides: Sequence[str], recipe: Recipe[Any]) -> set[str]:
    """Keys of a composed tree that its run does not read; none while that cannot be told.

    Conditions look at the user's own losses and estimators, which are imported for that.
    """
    with redirect_stdout(sys.stderr):  # what they print is no part of a tree on stdout
        try:
            config, _ = _settled(copy.deepcopy(tree), override_keys(overrides), recipe)
            return keys_left_out(config)
        except Exception:  # noqa: BLE001 - an import of theirs may raise anything: the run says it
            return set()


def _our_own(err: BaseException) -> ConfigError | None:
    """The `ConfigError` of a resolver, which OmegaConf wraps."""
    cause = err.__cause__ or err.__context__
    while cause is not None and not isinstance(cause, ConfigError):
        cause = cause.__cause__ or cause.__context__
    return cause
