"""The value model; settings that it does not override are the actor's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import Section, key
from workers.config.conditions import CUT_BY_SAMPLES, CUT_BY_TOKENS
from workers.config.model import (
    CheckpointConfig,
    OptimConfig,
    ShardedConfig,
    role_axes,
    role_sharding,
)
from workers.config.policy import LOSS_AGG_MODES


@dataclass(kw_only=True)
class CriticModelConfig(Section):
    """The critic's model; types, attention, packing and LoRA's other settings are the actor's."""

    path: str = key("", allows="a folder")
    """Folder of the model."""
    enable_gradient_checkpointing: bool | None = key(None, may_change_on_resume=True)
    """Recompute activations in the backward pass; null: on CUDA."""
    lora_rank: int = key(0, at_least=0)
    """LoRA rank; 0 trains all weights. The head is always trained."""
    fsdp_config: dict[str, Any] = role_sharding()
    """Sharding that differs from what `critic.strategy` says."""


@dataclass(kw_only=True)
class CriticConfig(ShardedConfig):
    """The value model and its update."""

    model: CriticModelConfig = key(factory=CriticModelConfig)
    """Value model. The head of a reward model is reused; otherwise it starts at zero."""
    parallel: dict[str, Any] = role_axes()
    """Axes of the critic that differ from the run's `parallel`."""
    optim: dict[str, Any] = key(factory=lambda: {"lr": 1e-5}, options=OptimConfig)
    """Settings that differ from the actor's `optim`."""
    ppo_mini_batch_size: int | None = key(None, allows="a divisor of `data.train_batch_size`")
    """Prompts per optimizer step, over all ranks; null: the actor's."""
    ppo_micro_batch_size_per_gpu: int = key(
        8, above=0, read_when=CUT_BY_SAMPLES, may_change_on_resume=True
    )
    """Samples per pass and rank."""
    ppo_max_token_len_per_gpu: int | None = key(
        None,
        allows="prompt and response, or more",
        read_when=CUT_BY_TOKENS,
        may_change_on_resume=True,
    )
    """Tokens per pass and rank; null: the actor's."""
    ppo_epochs: int | None = key(None, above=0, hint="or null for the actor's")
    """Passes over the batch per update."""
    cliprange_value: float = key(0.5, above=0)
    """Clip range of values."""
    loss_agg_mode: str | None = key(None, choices=LOSS_AGG_MODES)
    """Reduction of token losses to one number; null: the actor's."""
    grad_clip: float = key(1.0, above=0)
    """Largest gradient norm."""
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig)
    """Contents of checkpoints."""
