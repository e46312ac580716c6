"""Supervised fine-tuning as a recipe: `load_config(overrides, SFT)` gives its configuration."""

from __future__ import annotations

from pathlib import Path

from trainer.config.recipe import Recipe, presets
from trainer.rows.recipe import check_rows_config, load_registries
from trainer.sft.config import SFTConfig

SFT = Recipe(
    name="sft",
    schema=SFTConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="sft_trainer",
    placements=presets({"global_pool": ["sft"]}),
    load_registries=load_registries,
    checks=(check_rows_config,),
)
