"""`verl-like sft|... key=value ...`: a run of a recipe other than PPO."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from trainer.command_errors import ending_in_words
from trainer.config.compose import compose_tree, load_config, prepare_overrides
from trainer.config.recipe import Recipe
from trainer.config.show import annotated_yaml


def main(recipe: Recipe[Any], arguments: Sequence[str]) -> None:
    """Run with these settings, or print them all (`--cfg job`)."""
    if list(arguments[:2]) == ["--cfg", "job"]:
        tree = compose_tree(prepare_overrides(arguments[2:], recipe), recipe)
        recipe.load_registries()  # the comments list the registered names
        print(annotated_yaml(tree, recipe.schema, resolve=False), end="")
        return

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("trainer").setLevel(logging.INFO)
    config = load_config(arguments, recipe)
    from trainer.launch import run

    with ending_in_words(config.trainer.default_local_dir):
        run(config)
