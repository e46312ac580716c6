"""`python -m trainer.main_ppo key=value ...`:

Hydra's entry to a PPO run (`verl-like ppo` calls the same `main`).
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer.command_errors import ending_in_words
from trainer.config.compose import (
    compose_tree,
    from_composed,
    in_words,
    prepare_overrides,
    register,
)
from trainer.config.show import annotated_yaml
from trainer.multirun import Sweep
from trainer.ppo.help_text import HELP
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError
from verl_like.terminal import end_with_the_reader, fit, terminal_width

ONLY_SHOWN = {"-h", "--help", "--hydra-help", "-c", "--cfg", "-i", "--info", "trainer.dry_run=true"}
"""Arguments with which nothing is trained."""
SHOW_TREE = {("-c", "job"), ("--cfg", "job"), ("--cfg=job",)}
"""The options that print the tree of a command; Hydra's print without the rules of its keys."""
RESOLVE = "--resolve"
FULL_ERROR = "HYDRA_FULL_ERROR"
"""The variable by which Hydra is asked for tracebacks; set by the user, it gives them."""
_sweep = Sweep()
"""Of this process."""


@hydra.main(config_path=str(PPO.config_dir), config_name=PPO.config_name, version_base="1.3")
def _job(composed: DictConfig) -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("trainer").setLevel(logging.INFO)
    hydra_config = HydraConfig.get()
    overrides = list(hydra_config.overrides.task)
    with ExitStack() as around:
        folder = composed.trainer.default_local_dir
        if hydra_config.mode == RunMode.MULTIRUN:
            folder += f"/{hydra_config.job.num}"
            around.enter_context(_sweep.job(overrides, folder))
        around.enter_context(ending_in_words(folder))
        config = from_composed(composed, overrides, PPO)
        config.trainer.default_local_dir = folder
        from trainer.launch import run

        run(config)


def main() -> None:
    """Check the overrides in `sys.argv`, then let Hydra go on.

    It composes and runs, or only prints (`--cfg hydra`). `--help` and `--cfg job` are printed here.
    """
    arguments = sys.argv[1:]
    if ONLY_SHOWN & set(arguments):
        end_with_the_reader()
    if {"-h", "--help"} & set(arguments):
        print(fit(HELP.rstrip(), terminal_width()))
        return
    if not {"-sc", "--shell-completion"} & set(arguments):
        overrides = [a for a in arguments if is_override(a)]
        try:
            rest = [a for a in arguments if a not in overrides]
            overrides = prepare_overrides(overrides, PPO, config_dir_of(rest))
            if tuple(option for option in rest if option != RESOLVE) in SHOW_TREE:
                tree = compose_tree(overrides, PPO)
                PPO.load_registries()  # the comments list the registered names
                print(annotated_yaml(tree, PPO.schema, resolve=RESOLVE in rest), end="")
                return
            sys.argv[1:] = rest + overrides
        except ConfigError as err:
            sys.exit(f"error: {err}")
    register(PPO)  # another recipe of this process may have registered its presets since
    compose_and_run()
    if _sweep.jobs:
        _sweep.close()


def compose_and_run() -> None:
    """Hydra's part; what it refuses, in a user's YAML say, ends with a line, too."""
    if FULL_ERROR in os.environ:
        _job()
        return
    os.environ[FULL_ERROR] = "1"  # Hydra then raises its errors, which it else prints and frames
    try:
        _job()
    except HydraException as err:
        sys.exit(f"error: {in_words(err, PPO, config_dir_of(sys.argv[1:]))}")
    finally:
        del os.environ[FULL_ERROR]


def config_dir_of(options: Sequence[str]) -> Path | None:
    """The folder of `--config-dir`, if it is given."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config-dir", "-cd", type=Path)
    found: Path | None = parser.parse_known_args(options)[0].config_dir
    return found


def is_override(argument: str) -> bool:
    """Whether it sets, adds or deletes (`~key`) a key; what starts with `-` is Hydra's option."""
    return not argument.startswith("-") and ("=" in argument or argument.startswith("~"))


if __name__ == "__main__":
    main()
