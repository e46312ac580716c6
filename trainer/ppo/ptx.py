"""PTX in PPO: the rows whose language-model loss every optimizer step trains beside the policy's.

`PPOTrainer.prepare` makes the loader, `PPOTrainer.update` takes from it; the loss is the actor's.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from trainer.data.lm_rows import LMRow, lm_batch, read_lm_rows
from trainer.data.row_loader import RowLoader
from trainer.ppo.config import PPOConfig


def make_ptx_loader(config: PPOConfig, tokenizer: Any) -> RowLoader[LMRow] | None:
    """The loader of `ptx.train_files`, if there are any."""
    if not config.ptx.train_files:
        return None
    files, longest, on_bad_row = config.ptx.train_files, longest_row(config), config.data.on_bad_row
    rows = read_lm_rows("ptx.train_files", files, tokenizer, longest, on_bad_row=on_bad_row)
    make_batch = partial(lm_batch, pad_token_id=tokenizer.pad_token_id)
    return RowLoader(rows, config.trainer.seed, make_batch)


def longest_row(config: PPOConfig) -> int:
    """Tokens of the longest row: by default those of a prompt with its response."""
    sample = config.data.max_prompt_length + config.data.max_response_length
    return config.ptx.max_length or sample


def rows_per_update(config: PPOConfig, num_prompts: int) -> int:
    """Rows of all optimizer steps of an `update_actor` on the samples of so many prompts."""
    actor = config.actor_rollout_ref.actor
    num_steps = num_prompts // actor.ppo_mini_batch_size * actor.ppo_epochs
    return num_steps * (config.ptx.batch_size or actor.ppo_mini_batch_size)
