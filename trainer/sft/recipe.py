"""Supervised fine-tuning as a recipe: `load_config(overrides, SFT)` gives its configuration."""

from __future__ import annotations

from pathlib import Path

from trainer.config.recipe import Recipe, presets
from trainer.sft.config import SFTConfig
from verl_like.errors import ConfigError


def load_registries() -> None:
    """Import what registers optimizers; it imports torch."""
    import workers.training.optim  # noqa: F401


def check(config: SFTConfig) -> None:
    """The rules between fields."""
    from workers.parallel.fsdp import settle

    settle(config.model.strategy, config.model.fsdp_config, "model.fsdp_config")
    data = config.data
    if data.use_dynamic_bsz and data.max_length > data.max_token_len_per_gpu:
        raise ConfigError(
            f"data.max_length={data.max_length} tokens does not fit into a pass of "
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu} tokens; lower the one, or "
            "raise the other."
        )


SFT = Recipe(
    name="sft",
    schema=SFTConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="sft_trainer",
    placements=presets({"global_pool": ["sft"]}),
    load_registries=load_registries,
    checks=(check,),
)
