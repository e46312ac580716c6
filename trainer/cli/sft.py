"""`verl-like sft key=value ...`: a run of supervised fine-tuning."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from trainer.config.compose import compose_tree, load_config, prepare_overrides
from trainer.config.show import annotated_yaml
from trainer.sft.recipe import SFT


def main(arguments: Sequence[str]) -> None:
    """Run with these settings, or print them all (`--cfg job`)."""
    if list(arguments[:2]) == ["--cfg", "job"]:
        tree = compose_tree(prepare_overrides(arguments[2:], SFT), SFT)
        SFT.load_registries()  # the comments list the registered names
        print(annotated_yaml(tree, SFT.schema, resolve=False), end="")
        return

    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("trainer").setLevel(logging.INFO)
    config = load_config(arguments, SFT)
    from trainer.launch import run

    try:
        run(config)
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint, where there is one")
        sys.exit(130)
