"""The uids of prompts: those that a run trained on, and those that it had to train on."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import lines, overrides
from trainer import load_config
from trainer.async_training.recipe import ASYNC
from trainer.data.prompts import PromptLoader, load_tokenizer


def uids_of(folder: Path, num_steps: int) -> list[list[str]]:
    """Of each step's samples; sorted, for ranks are given rows by their lengths."""
    steps = range(1, num_steps + 1)
    return [sorted(row["uid"] for row in lines(folder, f"rollouts/{step}.jsonl")) for step in steps]


def uids_in_order(tiny: Path, num_steps: int, *more: str) -> list[list[str]]:
    """What `uids_of` says of a run that takes prompts in order, two samples of each."""
    config = load_config(overrides(tiny, tiny / "no_run", *more), ASYNC)
    loader = PromptLoader(config, load_tokenizer(config.actor_rollout_ref.model.path))
    batches = [loader.batch(number).non_tensor_batch["uid"] for number in range(num_steps)]
    return [sorted([*batch, *batch]) for batch in batches]
