"""Reward-model training as a recipe: `load_config(overrides, REWARD_MODEL)` composes it."""

from __future__ import annotations

from pathlib import Path

from trainer.config.recipe import Recipe, presets
from trainer.reward_model.config import RewardModelRunConfig
from trainer.rows import recipe as rows


def load_registries() -> None:
    """Import what registers optimizers and losses; it imports torch."""
    import workers.losses.pairwise  # noqa: F401

    rows.load_registries()


REWARD_MODEL = Recipe(
    name="reward-model",
    schema=RewardModelRunConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="reward_model_trainer",
    placements=presets({"global_pool": ["reward_model"]}),
    load_registries=load_registries,
    checks=(rows.check_rows_config, rows.check_pairs_fit),
)
