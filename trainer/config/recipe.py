"""A recipe as the configuration sees it: its schema, YAML, roles, and rules between fields.

    SFT = Recipe(
        name="sft", schema=SFTConfig, config_dir=Path(__file__).parent, config_name="sft_trainer",
        placements=placement_presets({"model_pool": ["actor"], "judge_pool": ["judge"]}),
    )
    config = load_config(["data.train_files=x"], SFT)

The YAML begins with `defaults: [sft_schema, placement: colocate, _self_]`. A recipe passes
knowledge of its algorithm as callables: `trainer.config` knows no algorithm.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hydra.core.override_parser.types import Override

from trainer.config.schema import RunConfig
from verl_like.errors import ConfigError

C = TypeVar("C", bound=RunConfig)
Placements = Mapping[str, Mapping[str, Sequence[str]]]
"""Preset -> pool -> its roles."""


@dataclass(frozen=True, eq=False)
class Recipe(Generic[C]):
    """A recipe for the configuration: its schema, YAML, roles, presets and checks.

    Example:

        MINE = Recipe("mine", MyConfig, Path(__file__).parent, "my_trainer", placements)
        config = load_config(["data.train_files=a.parquet"], MINE)      # a MyConfig

    Args:
        name: the recipe in messages and on the command line; its schema is `<name>_schema` in YAML.
        schema: the dataclass of its configuration.
        config_dir: folder of its YAML; files in its `placement/` are further presets.
        config_name: name of its YAML, without the ending.
        placements: the pools and roles of each `placement=<preset>`.
        inactive_roles: roles of the recipe that a configuration does not need -> why.
        extra_roles: further roles of a configuration -> (dotted path of the class, another role). A
            further role shares the other role's pool unless `role_mapping` has it.
        complete: returns the configuration with derived values, and notices to show. It gets the
            keys that the user set, and runs before `checks`.
        registries: the modules that register names for keys; they may import torch.
        checks: rules between fields: each raises `ConfigError`, or returns warnings to show.
        translate: translates another system's keys into ours, before settings are checked.
        settings_of_configuration: reads the settings in another system's YAML, from its
            `--config-name` and `--config-path`.
        shares_presets_of: folder of another recipe whose groups of presets it shares.
        own_folder: folder of the user's YAML, which adds presets and extends or replaces files.
    """

    name: str
    schema: type[C]
    config_dir: Path
    config_name: str
    placements: Placements
    inactive_roles: Callable[[Any], Mapping[str, str]] = lambda config: {}
    extra_roles: Callable[[Any], Mapping[str, tuple[str, str]]] = lambda config: {}
    complete: Callable[[C, Collection[str]], tuple[C, Sequence[str]]] = lambda config, keys: (
        config,
        (),
    )
    registries: Sequence[str] = ()
    checks: Sequence[Callable[[C], Sequence[str] | None]] = ()
    translate: Callable[[Sequence[Override]], Sequence[Override]] = lambda settings: settings
    settings_of_configuration: Callable[[str, str], Sequence[str]] | None = None
    shares_presets_of: Path | None = None
    own_folder: Path | None = None

    def __repr__(self) -> str:
        """Return the name, because signatures show a recipe as a default."""
        return f"Recipe({self.name!r})"

    def load_registries(self) -> None:
        """Import the modules of `registries`."""
        for module in self.registries:
            importlib.import_module(module)

    @property
    def groups(self) -> list[str]:
        """Groups of presets: `placement`, and the folders of YAML files, own and shared ones."""
        files = (path for folder in self._own_and_shared for path in folder.glob("*/*.yaml"))
        return sorted({"placement", *(path.parent.name for path in files)})

    def preset_names(self, group: str) -> list[str]:
        """Return the presets of a group; an unknown group has none.

        They are the files of its folders and, for `placement`, the names in `placements`.
        """
        files = [path.stem for folder in self.folders for path in folder.glob(f"{group}/*.yaml")]
        return sorted({*files, *(self.placements if group == "placement" else ())})

    @property
    def folders(self) -> list[Path]:
        """The folders to search for YAML; the folder with the run's main file comes first."""
        if self.own_folder is None:
            return self._own_and_shared
        is_main = (self.own_folder / self.config_name).with_suffix(".yaml").is_file()
        user_folders, our_folders = [self.own_folder], self._own_and_shared
        return [*user_folders, *our_folders] if is_main else [*our_folders, *user_folders]

    @property
    def _own_and_shared(self) -> list[Path]:
        return [self.config_dir, *([self.shares_presets_of] if self.shares_presets_of else [])]

    def with_files_of(self, folder: Path, main: str | None) -> Recipe[C]:
        """Return the recipe with a folder of the user's YAML and, optionally, a main file in it."""
        if not folder.is_dir():
            raise ConfigError(f"--config-dir: there is no folder '{folder}'.")
        return replace(self, own_folder=folder, config_name=main or self.config_name)


def placement_presets(split: Mapping[str, Sequence[str]]) -> Placements:
    """Return the presets of a recipe whose `placement=split` puts roles on these pools.

    `colocate` puts all of them on one pool, `standalone` puts each on its own.

    Example:

        placement_presets({"policy_pool": ["actor", "rollout"], "critic_pool": ["critic"]})
    """
    roles = [role for pool_roles in split.values() for role in pool_roles]
    return {
        "colocate": {"global_pool": roles},
        "split": split,
        "standalone": {f"{role}_pool": [role] for role in roles},
    }
