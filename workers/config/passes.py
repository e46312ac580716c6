"""Real tokens per pass, if micro-batches are limited by tokens and no key sets the limit.

The driver writes a smaller limit into the configuration if a device has less memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.config import WorkersConfig

LARGEST_PASS = 16384
"""Largest pass in tokens, unless a single row is longer."""


def fewest_tokens_per_pass(config: WorkersConfig) -> int:
    """Return the length of the longest row that a pass must fit: a sample, or a text of PTX."""
    sample: int = config.data.max_prompt_length + config.data.max_response_length
    text = config.ptx.max_length if config.ptx.train_files else None
    return max(sample, text or 0)


def tokens_per_pass(config: WorkersConfig) -> int:
    """Return the actor's `ppo_max_token_len_per_gpu`, or the value that null means."""
    limit = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    return limit or max(LARGEST_PASS, fewest_tokens_per_pass(config))
