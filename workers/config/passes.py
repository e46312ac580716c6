"""Real tokens of a pass, where micro-batches are cut by tokens and no key says how many.

The driver writes fewer into the configuration where a device has less memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.config import WorkersConfig

LARGEST_PASS = 16384
"""Tokens of a pass at most, unless a row alone has more."""


def fewest_tokens_per_pass(config: WorkersConfig) -> int:
    """Tokens of the longest row that a pass must hold: a sample's, or a text's of PTX."""
    sample: int = config.data.max_prompt_length + config.data.max_response_length
    text = config.ptx.max_length if config.ptx.train_files else None
    return max(sample, text or 0)


def tokens_per_pass(config: WorkersConfig) -> int:
    """The actor's `ppo_max_token_len_per_gpu`, or what stands for null."""
    given = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    return given or max(LARGEST_PASS, fewest_tokens_per_pass(config))
