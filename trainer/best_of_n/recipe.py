"""usage: verl-like best-of-n data.train_files=FILE
           actor_rollout_ref.model.path=FOLDER [key=value ...]

Samples several responses per prompt, scores them with the rewards of `verl-like
ppo`, and saves the best ones for `verl-like sft` (rejection sampling), or pairs
of best and worst. The same command continues a killed run.

  actor_rollout_ref.rollout.n=16  responses per prompt
  reward=FILE.py:FUNCTION         default: the rule for a row's data_source
  selection.top_k=2               responses to save per prompt
  selection.min_score=0.5         lowest score to save
  selection.format=pairs          save prompt, chosen, rejected
  selection.file=best.parquet     or .jsonl; by default selected.jsonl in the
                                  run folder
  verl-like best-of-n --cfg all   every key with its meaning
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.recipe import Recipe, placement_presets
from trainer.config.schema import RunConfig, TrainerConfig
from trainer.data.config import DataConfig
from trainer.ppo.recipe import NO_REWARD_MODEL, extra_roles
from trainer.ppo.verl import translate
from verl_like.config_key import Section, changed, config_field, when
from verl_like.errors import ConfigError
from workers.config import (
    ModelConfig,
    RolloutConfig,
    ScoringSections,
    has_environment,
    model_rewards,
)

NO_TRAINING = "this recipe trains nothing"
NO_EPOCHS = "this recipe takes every prompt once, in order"
NO_VALIDATION = "this recipe has no validations"
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
    rollout: RolloutConfig = config_field(factory=partial(RolloutConfig, n=8))
    """Engine, sampling and memory of the generation."""


@dataclass(kw_only=True)
class SelectionConfig(Section):
    """Which samples to save, and where."""

    format: str = config_field("sft", choices=("sft", "pairs"))
    """sft: the best samples of each prompt as rows that `verl-like sft` reads; pairs: each prompt's
    best as chosen and its worst as rejected.
    """
    top_k: int = config_field(
        1, above=0, read_when=when("format", "sft", otherwise="a pair is one of each prompt")
    )
    """Maximum number of samples kept per prompt; of samples with equal texts, one is kept."""
    min_score: float | None = config_field(None, allows="a number")
    """Minimum score of samples that are kept (or chosen, in pairs); null disables the minimum."""
    truncated: str = config_field("keep", choices=("keep", "drop"))
    """Samples that the length limit cut (`finish_reason` is length). `keep`: keep them, without an
    end in the loss; `drop`: drop and count them.
    """
    file: str = config_field(
        "", allows="a .parquet or .jsonl file, written when the run ends", may_change_on_resume=True
    )
    """Output file; empty: `selected.jsonl` in the run folder."""


@dataclass(kw_only=True)
class SamplingOnlyConfig(RunConfig, ScoringSections):
    """A run that samples and scores without training."""

    data: DataConfig = config_field(factory=partial(DataConfig, train_batch_size=64))
    """Prompts: all of them once, in order, `train_batch_size` at a time."""
    actor_rollout_ref: SampledPolicyConfig = config_field(factory=SampledPolicyConfig)
    """The model that is sampled, and its rollout settings."""


@dataclass(kw_only=True)
class BestOfNConfig(SamplingOnlyConfig):
    """A run that samples, scores and selects."""

    never_read = {
        NO_TRAINING: ONLY_IN_TRAINING,
        NO_EPOCHS: ("data.shuffle", "data.sampler", "trainer.total_epochs"),
        NO_VALIDATION: (
            "data.val_files",
            "actor_rollout_ref.rollout.val_kwargs",
            "trainer.test_freq",
            "trainer.val_before_train",
        ),
    }
    selection: SelectionConfig = config_field(factory=SelectionConfig)
    """Which samples are kept."""
    trainer: TrainerConfig = config_field(
        factory=partial(
            TrainerConfig,
            cls="trainer.best_of_n.step.BestOfNTrainer",
            experiment_name="best_of_n",
            save_freq=1,
            max_ckpt_to_keep=1,
        )
    )
    """The run; its checkpoints hold a position but no weights."""


C = TypeVar("C", bound=SamplingOnlyConfig)


def inactive_roles(config: Any) -> dict[str, str]:
    """Map each role that a run does not need to the reason."""
    if model_rewards(config):
        return {}
    return {"reward_model": NO_REWARD_MODEL}


def without_adapter(config: C, keys: Collection[str]) -> tuple[C, Sequence[str]]:
    """Return the configuration without LoRA: the rollout has the weights of the model's folder."""
    return changed(config, {"actor_rollout_ref.model.lora_rank": 0}), ()


def check(config: BestOfNConfig) -> None:
    """Run the checks across keys of rewards and engines."""
    from trainer.ppo.checks import check_quantized_device
    from trainer.rollouts.reward_checks import check_rewards
    from workers.rollout.sampling import check_sampling

    check_rewards(config)
    check_quantized_device(config)
    rollout, selection = config.actor_rollout_ref.rollout, config.selection
    check_sampling(rollout, config.data.max_response_length)
    for number, reward in enumerate(config.reward.list):
        if reward.normalize:
            raise ConfigError(
                f"reward.list[{number}].normalize=true: scores are compared with "
                "selection.min_score and saved, so they must not depend on the batch. Set "
                f"reward.list[{number}].normalize=false."
            )

    if has_environment(config) and (selection.format == "pairs" or config.environment.tools):
        name = "environment.tools" if config.environment.tools else "selection.format=pairs"
        raise ConfigError(
            f"{name}: with an environment, each selected sample becomes one row of `messages` for "
            "verl-like sft, which has neither tools nor pairs. Leave this key out."
        )
    wanted = 2 if selection.format == "pairs" else selection.top_k
    if rollout.n < wanted:
        reason = f"selection.top_k={wanted} keeps more"
        if selection.format == "pairs":
            reason = "a pair is made of two"
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={rollout.n} samples per prompt are too few, because "
            f"{reason}. Set actor_rollout_ref.rollout.n to {wanted} or more."
        )
    if rollout.n > 1 and not rollout.do_sample:
        raise ConfigError(
            f"actor_rollout_ref.rollout.do_sample=false: all {rollout.n} samples of a prompt "
            "would be the same greedy response. Set actor_rollout_ref.rollout.do_sample=true, or "
            "actor_rollout_ref.rollout.n=1."
        )
    if selection.file and Path(selection.file).suffix not in (".parquet", ".jsonl"):
        raise ConfigError(f"selection.file={selection.file}: it must end in .parquet or .jsonl.")


BEST_OF_N = Recipe(
    name="best-of-n",
    schema=BestOfNConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="best_of_n",
    placements=placement_presets({"rollout_pool": ["rollout"], "reward_pool": ["reward_model"]}),
    inactive_roles=inactive_roles,
    extra_roles=extra_roles,
    complete=without_adapter,
    checks=(check,),
    translate=translate,
)
