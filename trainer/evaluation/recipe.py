"""The recipe of an evaluation: `load_config(overrides, EVAL)` returns its configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from trainer.best_of_n.recipe import (
    BEST_OF_N,
    NO_EPOCHS,
    NO_TRAINING,
    ONLY_IN_TRAINING,
    SamplingOnlyConfig,
)
from trainer.config.recipe import Recipe
from trainer.config.schema import TrainerConfig
from verl_like.config_key import config_field
from verl_like.errors import ConfigError
from workers.config.environment import has_environment


@dataclass(kw_only=True)
class EvaluationConfig(SamplingOnlyConfig):
    """A run that samples the validation prompts, scores the samples and reports their means."""

    never_read = {
        NO_TRAINING: ("data.train_files", *ONLY_IN_TRAINING),
        NO_EPOCHS: ("data.shuffle", "data.sampler", "trainer.total_epochs"),
        "an evaluation is one step": (
            "trainer.total_training_steps",
            "trainer.stop_at",
            "trainer.test_freq",
            "trainer.val_before_train",
            "trainer.save_freq",
            "trainer.save_every_minutes",
            "trainer.save_final",
        ),
        "an evaluation samples by rollout.val_kwargs": tuple(
            f"actor_rollout_ref.rollout.{name}"
            for name in ("n", "temperature", "top_k", "top_p", "do_sample")
        ),
    }
    trainer: TrainerConfig = config_field(
        factory=partial(
            TrainerConfig,
            cls="trainer.evaluation.step.Evaluation",
            backend="local",
            experiment_name="eval",
            default_local_dir="runs/verl_like/eval",
            save_every_minutes=None,
            resume_mode="disable",
        )
    )
    """The run; resume_mode=disable writes over an earlier evaluation in the same folder."""


def check(config: EvaluationConfig) -> None:
    """Run the checks across keys of rewards and engines."""
    from trainer.rollouts.reward_checks import check_rewards
    from workers.rollout.sampling import check_sampling

    if not config.data.val_files:
        words = "data.val_files is empty. Set a parquet, JSONL or CSV file, or a list of files"
        if has_environment(config):
            words += ", or, if the environment makes its prompts, their number (data.val_files=100)"
        raise ConfigError(f"{words}.")
    check_rewards(config)
    rollout = config.actor_rollout_ref.rollout
    check_sampling(rollout, config.data.max_response_length)


EVAL: Recipe[EvaluationConfig] = replace(
    cast(Recipe[Any], BEST_OF_N),
    name="eval",
    schema=EvaluationConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="evaluation",
    checks=(check,),
)
"""It has the roles and presets of `BEST_OF_N`, and translates the same keys."""
