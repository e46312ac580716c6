"""An evaluation as a recipe: `load_config(overrides, EVAL)` gives its configuration."""

from __future__ import annotations

from pathlib import Path

from trainer.best_of_n.recipe import inactive_roles
from trainer.config.recipe import Recipe, presets
from trainer.evaluation.config import EvaluationConfig
from trainer.ppo.recipe import extra_roles


def check(config: EvaluationConfig) -> None:
    """The rules between fields; they look into the rewards and the engines."""
    from trainer.rollouts.reward_checks import check_rewards
    from workers.rollout.sampling_settings import check_sampling

    check_rewards(config)
    rollout = config.actor_rollout_ref.rollout
    check_sampling(rollout, config.data.max_response_length)


EVAL = Recipe(
    name="eval",
    schema=EvaluationConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="evaluation",
    placements=presets({"rollout_pool": ["rollout"], "reward_pool": ["reward_model"]}),
    inactive_roles=inactive_roles,
    extra_roles=extra_roles,
    checks=(check,),
)
