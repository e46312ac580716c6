"""An evaluation as a recipe: `load_config(overrides, EVAL)` gives its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.best_of_n.config import (
    NO_EPOCHS,
    NO_TRAINING,
    BestOfNTrainerConfig,
    GenerationConfig,
    PromptsConfig,
    SampledPolicyConfig,
    SamplingOnlyConfig,
)
from trainer.best_of_n.recipe import inactive_roles
from trainer.config.recipe import Recipe, presets
from trainer.config.schema import NAME_A_FOLDER
from trainer.ppo.recipe import extra_roles
from verl_like.config_key import key, unread
from workers.config import ValidationSamplingConfig


@unread(NO_TRAINING, "train_files")
@dataclass(kw_only=True)
class EvaluationDataConfig(PromptsConfig):
    """Prompts: files, sizes."""

    val_files: Any = key(
        "", allows="a file, or a list", required="give a parquet or JSONL file, or a list of them"
    )
    """A parquet or JSONL file in verl's schema, or a list; each data_source is told apart."""
    train_batch_size: int = key(64, above=0)
    """Prompts that are sampled at a time; no effect on the result."""


@unread(
    "an evaluation samples by rollout.val_kwargs",
    *("n", "temperature", "top_k", "top_p", "do_sample"),
)
@dataclass(kw_only=True)
class EvaluationRolloutConfig(GenerationConfig):
    """Generation."""

    n: int = key(1, above=0)
    """Samples per prompt."""
    val_kwargs: ValidationSamplingConfig = key(factory=ValidationSamplingConfig)
    """Sampling."""


@dataclass(kw_only=True)
class EvaluatedPolicyConfig(SampledPolicyConfig):
    """The model that is evaluated."""

    rollout: EvaluationRolloutConfig = key(factory=EvaluationRolloutConfig)
    """Generation."""


@unread("an evaluation is one step", "total_training_steps", "stop_at")
@unread(NO_EPOCHS, "save_freq", "save_every_minutes")
@dataclass(kw_only=True)
class EvaluationTrainerConfig(BestOfNTrainerConfig):
    """The run: devices, folder."""

    cls: str = key("trainer.evaluation.step.Evaluation", allows="a dotted path")
    """Dotted path of the trainer: Evaluation, or a subclass that overrides its step or hooks."""
    backend: str = key("local", choices=("ray", "local", "torchrun"))
    """local needs no cluster; torchrun runs in the processes that it started."""
    save_freq: int = key(-1, above=0, or_exactly=-1)
    """Steps between checkpoints."""
    save_every_minutes: float | None = key(None, above=0)
    """Minutes between checkpoints."""
    experiment_name: str = key("eval", allows="a name", may_change_on_resume=True)
    """Second part of the run folder's name."""
    default_local_dir: str = key("runs/verl_like/eval", allows="a folder", required=NAME_A_FOLDER)
    """Run folder: configuration, metrics, samples, logs, report."""
    resume_mode: str = key("disable", choices=("auto", "disable", "resume_path"))
    """disable writes over an earlier evaluation in the same folder."""


@dataclass(kw_only=True)
class EvaluationConfig(SamplingOnlyConfig):
    """A run that samples, scores and counts."""

    data: EvaluationDataConfig = key(factory=EvaluationDataConfig)
    """Prompts."""
    actor_rollout_ref: EvaluatedPolicyConfig = key(factory=EvaluatedPolicyConfig)
    """Policy."""
    trainer: EvaluationTrainerConfig = key(factory=EvaluationTrainerConfig)
    """The run."""


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
