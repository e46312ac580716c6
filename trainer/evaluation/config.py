"""The whole configuration tree of an evaluation.

Its sections are best-of-n's and PPO's, so that a run's keys carry over. It samples as a validation
does: by `rollout.val_kwargs`, and never by the settings of training.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.best_of_n.config import (
    IN_ORDER,
    IN_TRAINING,
    BestOfNTrainerConfig,
    GenerationConfig,
    PromptsConfig,
    SampledPolicyConfig,
    SamplingOnlyConfig,
)
from trainer.config.schema import NAME_A_FOLDER
from verl_like.config_key import When, key
from workers.config import ValidationSamplingConfig

IN_STEPS = When("a recipe has steps", lambda *_: False, "an evaluation is one step")
BY_VAL_KWARGS = When(
    "a recipe trains", lambda *_: False, "an evaluation samples by rollout.val_kwargs"
)


@dataclass(kw_only=True)
class EvaluationDataConfig(PromptsConfig):
    """Prompts: files, sizes."""

    train_files: Any = key("", allows="a file, or a list", read_when=IN_TRAINING)
    """The prompts of a training."""
    val_files: Any = key(
        "", allows="a file, or a list", required="give a parquet or JSONL file, or a list of them"
    )
    """A parquet or JSONL file in verl's schema, or a list; each data_source is told apart."""
    train_batch_size: int = key(64, above=0)
    """Prompts that are sampled at a time; no effect on the result."""


@dataclass(kw_only=True)
class EvaluationRolloutConfig(GenerationConfig):
    """Generation."""

    n: int = key(1, above=0, read_when=BY_VAL_KWARGS)
    """Samples per prompt."""
    temperature: float = key(1.0, above=0, read_when=BY_VAL_KWARGS)
    """Divides the logits."""
    top_k: int = key(-1, above=0, or_exactly=-1, hint="or -1 for all", read_when=BY_VAL_KWARGS)
    """Sample among the k likeliest tokens."""
    top_p: float = key(1.0, above=0, at_most=1, read_when=BY_VAL_KWARGS)
    """Sample among the likeliest tokens of this total probability."""
    do_sample: bool = key(True, read_when=BY_VAL_KWARGS)
    """Whether training draws at all."""
    val_kwargs: ValidationSamplingConfig = key(factory=ValidationSamplingConfig)
    """Sampling."""


@dataclass(kw_only=True)
class EvaluatedPolicyConfig(SampledPolicyConfig):
    """The model that is evaluated."""

    rollout: EvaluationRolloutConfig = key(factory=EvaluationRolloutConfig)
    """Generation."""


@dataclass(kw_only=True)
class EvaluationTrainerConfig(BestOfNTrainerConfig):
    """The run: devices, folder."""

    cls: str = key("trainer.evaluation.step.Evaluation", allows="a dotted path")
    """Dotted path of the trainer: Evaluation, or a subclass that overrides its step or hooks."""
    backend: str = key("local", choices=("ray", "local", "torchrun"))
    """local needs no cluster; torchrun runs in the processes that it started."""
    total_training_steps: int | None = key(None, above=0, read_when=IN_STEPS)
    """Steps of the whole run."""
    stop_at: dict[str, float] = key(factory=dict, allows="metric: value", read_when=IN_STEPS)
    """Metric -> value: the run ends with the first step in which one of them is reached."""
    save_freq: int = key(-1, above=0, or_exactly=-1, read_when=IN_ORDER)
    """Steps between checkpoints."""
    save_every_minutes: float | None = key(None, above=0, read_when=IN_ORDER)
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
