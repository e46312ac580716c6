"""The uids of prompts: those that a run trained on, and the expected ones."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import lines, overrides
from trainer import load_config
from trainer.async_training.recipe import ASYNC
from trainer.data.prompts import PromptLoader, load_tokenizer


def uids_of(folder: Path, num_steps: int) -> list[list[str]]:
    """Return the uids of each step's samples, sorted because rows are dealt by length."""
    steps = range(1, num_steps + 1)
    return [sorted(row["uid"] for row in lines(folder, f"rollouts/{step}.jsonl")) for step in steps]


def uids_in_order(tiny: Path, num_steps: int, *more: str) -> list[list[str]]:
    """Return the expected `uids_of` of a run with prompts in order, two samples each."""
    config = load_config(overrides(tiny, tiny / "no_run", *more), ASYNC)
    loader = PromptLoader(config, load_tokenizer(config.actor_rollout_ref.model.path))
    batches = [loader.batch(number).non_tensor_batch["uid"] for number in range(num_steps)]
    return [sorted([*batch, *batch]) for batch in batches]
