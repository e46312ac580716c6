"""The command of a recipe: Hydra around `trainer.launch.run`.

    run_command(SFT, ["data.train_files=x", ...])       # verl-like sft data.train_files=x ...

Every recipe so has `--cfg job`, `--multirun` and `--config-dir` with YAML of the user's own.
`verl-like eval` also gives overrides that the user has not set.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer.command_errors import ending_in_words
from trainer.config.compose import (
    compose_tree,
    from_composed,
    left_out_of,
    prepare_overrides,
    register,
)
from trainer.config.own_files import OwnFiles
from trainer.config.recipe import Recipe
from trainer.config.refusals import in_words
from trainer.config.show import annotated_yaml
from trainer.multirun import Sweep
from verl_like.errors import ConfigError
from verl_like.terminal import end_with_the_reader

ONLY_SHOWN = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info"}
"""Arguments with which no process starts, not even one of a reward."""
SHOW_TREE = {("-c", "job"), ("--cfg", "job"), ("--cfg=job",)}
"""The options that print the keys that a command's run reads, with their rules."""
SHOW_ALL = {("-c", "all"), ("--cfg", "all"), ("--cfg=all",)}
"""Those that print every key of the recipe, and nothing of Hydra's own."""
RESOLVE = "--resolve"
FULL_ERROR = "HYDRA_FULL_ERROR"
"""The variable by which Hydra is asked for tracebacks; set by the user, it gives them."""
OF_HYDRA = (
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.sweep.dir=${trainer.default_local_dir}",
    "hydra.sweep.subdir=${hydra:job.num}",
)
"""Hydra writes nothing of its own, and a sweep's jobs have folders in the run folder."""


def run_command(recipe: Recipe[Any], arguments: Sequence[str], given: Sequence[str] = ()) -> None:
    """Check the overrides among the arguments, then let Hydra go on.

    It composes and runs, or only prints (`--help`, `--cfg hydra`). `--cfg job` and `--cfg all` are
    printed here.
    `given` are overrides below the user's; of those that nothing reads are no error.
    """
    if ONLY_SHOWN & set(arguments):
        end_with_the_reader()
    set_by_user: list[str] = []
    passed_on = list(arguments)
    if not {"-sc", "--shell-completion"} & set(arguments):
        overrides = [a for a in arguments if is_override(a)]
        rest = [a for a in arguments if a not in overrides]
        own = own_files(rest)
        try:
            _refuse_words(rest, recipe)
            set_by_user = prepare_overrides(overrides, recipe, own)
            overrides = [*prepare_overrides(given, recipe), *set_by_user]
            if tuple(option for option in rest if option != RESOLVE) in SHOW_TREE | SHOW_ALL:
                _show(recipe, overrides, rest)
                return
            passed_on = [*rest, *OF_HYDRA, *recipe.search_path, *overrides]
        except ConfigError as err:
            sys.exit(f"error: {err}")
    register(recipe)  # another recipe of this process may have registered its presets since
    sweep = Sweep()
    job = partial(_job, recipe=recipe, sweep=sweep, set_by_user=set_by_user)
    _compose_and_run(recipe, passed_on, job)
    if sweep.jobs:
        sweep.close()


def _show(recipe: Recipe[Any], overrides: Sequence[str], options: Sequence[str]) -> None:
    """The tree with the rules of its keys; Hydra would print it without."""
    tree = compose_tree(overrides, recipe)
    recipe.load_registries()  # the comments list the registered names
    shows_all = tuple(option for option in options if option != RESOLVE) in SHOW_ALL
    left_out = set() if shows_all else left_out_of(tree, overrides, recipe)
    print(annotated_yaml(tree, recipe.schema, RESOLVE in options, left_out), end="")


def _job(
    composed: DictConfig, recipe: Recipe[Any], sweep: Sweep, set_by_user: Sequence[str]
) -> None:
    """One run."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("trainer").setLevel(logging.INFO)
    hydra_config = HydraConfig.get()
    with ExitStack() as around:
        folder = composed.trainer.default_local_dir
        if hydra_config.mode == RunMode.MULTIRUN:
            folder += f"/{hydra_config.job.num}"
            around.enter_context(sweep.job(list(hydra_config.overrides.task), folder))
        around.enter_context(ending_in_words(folder))
        config = from_composed(composed, set_by_user, recipe)
        config.trainer.default_local_dir = folder
        from trainer.launch import run

        run(config)


def _compose_and_run(
    recipe: Recipe[Any], arguments: Sequence[str], job: Callable[[DictConfig], None]
) -> None:
    """Hydra's part; what it refuses, in a user's YAML say, ends with a line, too."""
    main = hydra.main(str(recipe.config_dir), recipe.config_name, version_base="1.3")(job)
    argv, asked = sys.argv, os.environ.get(FULL_ERROR)
    sys.argv = [argv[0], *arguments]  # which Hydra reads
    os.environ[FULL_ERROR] = "1"  # Hydra then raises its errors, which it else prints and frames
    try:
        main()
    except HydraException as err:
        if asked is not None:
            raise
        sys.exit(f"error: {in_words(err, recipe, own_files(arguments))}")
    finally:
        sys.argv = argv
        if asked is None:
            del os.environ[FULL_ERROR]


def own_files(options: Sequence[str]) -> OwnFiles | None:
    """The folder of `--config-dir`, if it is given, and the file of `--config-name`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    parser.add_argument("--config-name", "-cn")
    found, _ = parser.parse_known_args(options)
    return OwnFiles(found.config_dir, found.config_name) if found.config_dir else None


def _refuse_words(rest: Sequence[str], recipe: Recipe[Any]) -> None:
    """Refuse arguments that are neither settings nor Hydra's options, such as `--epochs 3`.

    And options that exclude each other, which Hydra refuses with a traceback.
    """
    options, unknown = get_args_parser().parse_known_args(rest)
    if options.cfg and options.multirun:
        raise ConfigError("--cfg shows one configuration, --multirun makes several: drop one.")
    if wrong := [*unknown, *options.overrides]:
        raise ConfigError(
            f"{wrong[0]} is no setting. Settings are written key=value, without dashes, as in "
            f"trainer.seed=2. All keys: verl-like {recipe.name} --cfg all"
        )


def is_override(argument: str) -> bool:
    """Whether it sets, adds or deletes (`~key`) a key; what starts with `-` is Hydra's option."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))
