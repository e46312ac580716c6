"""The recipe of an evaluation: `load_config(overrides, EVAL)` returns its configuration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.schema import Recipe, RunConfig, TrainerConfig, placement_presets
from trainer.data.config import DataConfig
from trainer.ppo.recipe import NO_REWARD_MODEL, extra_roles
from trainer.ppo.verl_keys import translate
from verl_like.config_key import Section, config_field, replace_keys
from verl_like.errors import ConfigError
from workers.config import ModelConfig, RolloutConfig, ScoringSections, model_rewards
from workers.config.environment import has_environment

NO_TRAINING = "this recipe trains nothing"
NO_EPOCHS = "this recipe takes every prompt once, in order"
ONLY_IN_TRAINING = (
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.share_prefixes",
    "actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.model.compile",
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "trainer.async_save",
)


@dataclass(kw_only=True)
class SampledPolicyConfig(Section):
    """Settings of the sampled policy."""

    model: ModelConfig = config_field(factory=ModelConfig)
    """The model, its adapter and its precision."""
    rollout: RolloutConfig = config_field(factory=RolloutConfig)
    """Engine, sampling and memory of the generation."""


@dataclass(kw_only=True)
class EvaluationConfig(RunConfig, ScoringSections):
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
    data: DataConfig = config_field(factory=partial(DataConfig, train_batch_size=64))
    """Prompts: all of them once, in order, `train_batch_size` at a time."""
    actor_rollout_ref: SampledPolicyConfig = config_field(factory=SampledPolicyConfig)
    """The model that is sampled, and its rollout settings."""
    trainer: TrainerConfig = config_field(
        factory=partial(
            TrainerConfig,
            cls="trainer.tools.evaluation.step.Evaluation",
            backend="local",
            experiment_name="eval",
            default_local_dir="runs/verl_like/eval",
            save_every_minutes=None,
            resume_mode="disable",
        )
    )
    """The run; resume_mode=disable writes over an earlier evaluation in the same folder."""


def inactive_roles(config: Any) -> dict[str, str]:
    """Map each role that a run does not need to the reason."""
    if model_rewards(config):
        return {}
    return {"reward_model": NO_REWARD_MODEL}


def without_adapter(
    config: EvaluationConfig, keys: Collection[str]
) -> tuple[EvaluationConfig, Sequence[str]]:
    """Return the configuration without LoRA: the rollout has the weights of the model's folder."""
    return replace_keys(config, {"actor_rollout_ref.model.lora_rank": 0}), ()


def check(config: EvaluationConfig) -> None:
    """Run the checks across keys of rewards and engines."""
    from trainer.rollouts.preflight import check_rewards
    from workers.rollout.sampling import check_sampling

    if not config.data.val_files:
        words = "data.val_files is empty. Set a parquet, JSONL or CSV file, or a list of files"
        if has_environment(config):
            words += ", or, if the environment makes its prompts, their number (data.val_files=100)"
        raise ConfigError(f"{words}.")
    check_rewards(config)
    rollout = config.actor_rollout_ref.rollout
    check_sampling(rollout, config.data.max_response_length)


EVAL = Recipe(
    name="eval",
    schema=EvaluationConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="evaluation",
    placements=placement_presets({"rollout_pool": ["rollout"], "reward_pool": ["reward_model"]}),
    inactive_roles=inactive_roles,
    extra_roles=extra_roles,
    complete=without_adapter,
    checks=(check,),
    translate=translate,
)
"""The recipe of `verl-like eval`, whose trainer is `Evaluation`.

Example:

    config = load_config(["data.val_files=a.parquet", "actor_rollout_ref.model.path=m"], EVAL)
"""
