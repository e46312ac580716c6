"""usage: verl-like export CHECKPOINT OUT [--role ROLE] [--adapter] [--average]
           [--model BASE]

Writes the folder OUT for `from_pretrained` and vLLM:

  verl-like export runs/verl_like/ppo trained

CHECKPOINT is a run folder, whose trained model is exported, or a global_step_N
in one; LoRA is merged. It needs no GPU and no cluster, whatever number of ranks
wrote the checkpoint, and the run need not have saved hf_model.

  --role critic    the role whose model is exported; by default the policy, or
                   the only trained model
  --adapter        the LoRA adapter for peft, not merged
  --average        the moving average of the weights
                   (actor_rollout_ref.actor.ema_decay)
  --model BASE     the folder of the base model, if it has moved
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

from trainer.run_folder.folder import MODEL
from trainer.run_folder.saved_model import find_saved_model
from verl_like.errors import ConfigError
from verl_like.files import why_not_writable
from verl_like.terminal import usage_text
from workers.training.checkpoints.manifest import ADAPTER


def main(arguments: Sequence[str]) -> None:
    """Write the folder, and print from which checkpoint its model is."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    parser = argparse.ArgumentParser("verl-like export", usage_text(__doc__))
    add = parser.add_argument
    add("checkpoint")
    add("out")
    add("--role", default="")
    add("--adapter", action="store_true")
    add("--average", action="store_true")
    add("--model", default="")
    options = parser.parse_args(arguments)
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"{out} is a file, or a folder with files. Choose a folder that does not exist yet."
        )
    problem = why_not_writable(out)
    if problem:
        raise ConfigError(f"{out} cannot be written: {problem}. Choose another folder.")

    has_adapter = Path(options.checkpoint, MODEL, ADAPTER).is_dir()
    is_inside = options.average or (options.adapter and not has_adapter)
    saved = find_saved_model(
        options.checkpoint, options.role, options.model, in_checkpoint=is_inside
    )
    saved.export(out, as_adapter=options.adapter, of_average=options.average)
    noun = "adapter" if options.adapter else "model"
    print(f"{out}: the {noun} of {saved.folder}, trained from {saved.model.path}")
