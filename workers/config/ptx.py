"""PTX: a language-model loss beside the policy's, so that the model keeps what it could say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import key


@dataclass(kw_only=True)
class PTXConfig:
    """Rows whose language-model loss is trained with the policy's: InstructGPT's PPO-ptx."""

    train_files: Any = key("", allows="a file, or a list")
    """Parquet or JSONL files of text, of prompts with responses, or of chats; empty: no PTX."""
    coef: float = key(1.0, at_least=0)
    """Weight of that loss beside the policy's."""
    batch_size: int | None = key(None, above=0, hint="or null")
    """Rows per optimizer step, over all ranks; null takes as many as `ppo_mini_batch_size`."""
    max_length: int | None = key(None, above=1, hint="or null")
    """Tokens that a row is cut to; null is a sample's: max_prompt_length + max_response_length."""
