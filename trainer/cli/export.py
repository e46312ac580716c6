"""`verl-like export CHECKPOINT OUT`: a trained model as a folder that other programs load."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from trainer.run_folder.saved_model import find_saved_model
from verl_like.errors import ConfigError


def main(arguments: Sequence[str]) -> None:
    """Write the folder, and say what it is of."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    options = _parser().parse_args(arguments)
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is not empty; give a folder that is not there yet.")

    saved = find_saved_model(options.checkpoint, options.role, options.model)
    saved.export(out, as_adapter=options.adapter, of_average=options.average)
    what = "adapter" if options.adapter else "model"
    print(f"{out}: the {what} of {saved.folder}, trained from {saved.model.path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verl-like export", description=__doc__)
    add = parser.add_argument
    add("checkpoint", help="a run folder (its newest checkpoint), or a global_step_N in it")
    add("out", help="the folder to write")
    add("--role", default="", help="whose model; by default the policy")
    add("--adapter", action="store_true", help="the LoRA adapter, not merged into its base")
    add("--average", action="store_true", help="the moving average of the weights")
    add("--model", default="", help="the folder it was trained from, where that has moved")
    return parser
