"""Hydra's tree of a recipe: schema, YAML, the chosen presets, then the values of the overrides.

Hydra takes a tenth of a second for a tree, and merging that into the schema a third as long. What
only the presets decide is composed and merged once, and kept; values are put into a copy of it as
Hydra puts them. Overrides that say more than that (`+key`, `~key`, a sweep, Hydra's own keys) go to
Hydra as they are, and so does what cannot be put in: its error is Hydra's.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.recipe import Recipe

Stamps = tuple[tuple[str, int], ...]
"""Path and time of writing of a recipe's YAML files: an edited one is read again."""


@lru_cache(maxsize=4096)
def parse(override: str) -> Override:
    """An override as Hydra understands it; one that it does not is a `HydraException`."""
    (parsed,) = OverridesParser.create().parse_overrides([override])
    return parsed


class _KeptTree:
    """A tree as bytes, of which a copy is made in a third of the time of `deepcopy`."""

    def __init__(self, tree: DictConfig) -> None:
        file = io.BytesIO()
        pickler = _Pickler(file)
        pickler.dump(tree)
        self._content, self._classes = file.getvalue(), pickler.classes

    def copy(self) -> DictConfig:
        tree = _Unpickler(io.BytesIO(self._content), self._classes).load()
        assert isinstance(tree, DictConfig), "what was kept is a tree"
        return tree


class _Pickler(pickle.Pickler):
    """Leaves classes out: that of a schema need not be one that can be imported."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.classes: list[type] = []

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, type):
            return None
        self.classes.append(thing)
        return len(self.classes) - 1


class _Unpickler(pickle.Unpickler):
    """Puts the classes back."""

    def __init__(self, file: io.BytesIO, classes: Sequence[type]) -> None:
        super().__init__(file)
        self._classes = classes

    def persistent_load(self, number: int) -> type:
        return self._classes[number]


def compose_tree_of(recipe: Recipe[Any], overrides: Sequence[str]) -> DictConfig:
    """The tree of a registered recipe in its schema, not yet checked.

    A `HydraException` says what is wrong, an `OmegaConfBaseException` what is in no schema.
    """
    parsed = [parse(override) for override in overrides]
    groups = {override.key_or_group for override in parsed if _is_group(recipe, override)}
    presets = [override for override in parsed if override.key_or_group in groups]
    values = [override for override in parsed if override.key_or_group not in groups]

    if all(map(_chooses, presets)) and all(map(_sets_a_value, values)):
        lines = tuple(override.input_line or "" for override in presets)
        try:
            return _with_values(_kept(recipe, lines, _stamps(recipe)).copy(), values)
        except OmegaConfBaseException:
            pass  # Hydra says which override it is
    return into_schema(recipe, _composed(recipe, overrides))


def into_schema(recipe: Recipe[Any], composed: DictConfig) -> DictConfig:
    """A tree of Hydra's in which every key is the schema's, with its type."""
    merged = OmegaConf.merge(schema_node(recipe), composed)
    assert isinstance(merged, DictConfig), "a schema is a mapping of keys"
    return merged


@lru_cache(maxsize=64)
def schema_node(recipe: Recipe[Any]) -> DictConfig:
    """What OmegaConf makes of the schema; `merge` copies it."""
    node: DictConfig = OmegaConf.structured(recipe.schema)
    return node


def _composed(recipe: Recipe[Any], overrides: Sequence[str]) -> DictConfig:
    with initialize_config_dir(str(recipe.config_dir), version_base="1.3"):
        return compose(recipe.config_name, overrides=[*recipe.search_path, *overrides])


@lru_cache(maxsize=64)
def _kept(recipe: Recipe[Any], presets: tuple[str, ...], written: Stamps) -> _KeptTree:
    return _KeptTree(into_schema(recipe, _composed(recipe, presets)))


def _stamps(recipe: Recipe[Any]) -> Stamps:
    files = sorted(recipe.config_dir.rglob("*.yaml"))
    return tuple((str(path), path.stat().st_mtime_ns) for path in files)


def _is_group(recipe: Recipe[Any], override: Override) -> bool:
    return bool(recipe.preset_names(override.key_or_group))


def _chooses(override: Override) -> bool:
    """Whether it is `group=preset`."""
    is_plain = override.type is OverrideType.CHANGE and override.package is None
    return is_plain and not override.is_sweep_override()


def _sets_a_value(override: Override) -> bool:
    """Whether it is `key=value` or `++key=value`, of a key of the recipe's."""
    is_plain = override.type in (OverrideType.CHANGE, OverrideType.FORCE_ADD)
    is_of_recipe = override.package is None and not override.is_hydra_override()
    if not is_plain or not is_of_recipe or override.is_sweep_override():
        return False
    return str(override.value()) != "???"  # which merging leaves at the schema's default


def _with_values(tree: DictConfig, values: Sequence[Override]) -> DictConfig:
    for override in values:
        added = override.type is OverrideType.FORCE_ADD
        OmegaConf.update(tree, override.key_or_group, override.value(), merge=True, force_add=added)
    return tree
