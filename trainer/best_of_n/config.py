"""The whole configuration tree of best-of-n.

Its sections are PPO's, so that a command's keys carry over; to set a key of theirs that only
training or validation reads is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema import RunConfig, TrainerConfig
from trainer.data.config import DataConfig
from verl_like.config_key import key, unread, when
from workers.config import (
    ModelConfig,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
    RolloutConfig,
    ScoringConfig,
)
from workers.config.conditions import NO_REWARD_LIST

NO_TRAINING = "this recipe trains nothing"
NO_EPOCHS = "this recipe takes every prompt once, in order"
NO_VALIDATION = "this recipe has no validations"


@unread(NO_VALIDATION, "val_files")
@unread(NO_EPOCHS, "shuffle", "sampler")
@dataclass(kw_only=True)
class PromptsConfig(DataConfig):
    """Prompts: files, sizes."""

    train_batch_size: int = key(64, above=0)
    """Prompts per step; the last step may have fewer."""


@unread(NO_TRAINING, "enable_gradient_checkpointing", "use_remove_padding", "use_fused_kernels")
@unread(NO_TRAINING, "lora_rank")
@dataclass(kw_only=True)
class SampledModelConfig(ModelConfig):
    """The model that generates."""


@unread(NO_TRAINING, "update_weights_bucket_megabytes", "log_prob_micro_batch_size_per_gpu")
@unread(NO_VALIDATION, "val_kwargs")
@dataclass(kw_only=True)
class GenerationConfig(RolloutConfig):
    """Generation."""

    n: int = key(8, above=0)
    """Samples per prompt."""


@dataclass(kw_only=True)
class SampledPolicyConfig:
    """The policy that is sampled."""

    model: SampledModelConfig = key(factory=SampledModelConfig)
    """Model."""
    rollout: GenerationConfig = key(factory=GenerationConfig)
    """Generation."""


@dataclass(kw_only=True)
class SelectionConfig:
    """Which samples are kept, and where they go."""

    write: str = key("sft", choices=("sft", "pairs"))
    """sft: the best samples of each prompt as rows that `verl-like sft` reads; pairs: each prompt's
    best as chosen and its worst as rejected.
    """
    top_k: int = key(
        1, above=0, read_when=when("write", "sft", otherwise="a pair is one of each prompt")
    )
    """Samples kept of each prompt, at most; of equal scores the first, of equal texts one."""
    min_score: float | None = key(None, allows="a number")
    """Lowest score of a sample that is kept, or chosen; null keeps whatever is best."""
    file: str = key(
        "", allows="a .parquet or .jsonl file, written when the run ends", may_change_on_resume=True
    )
    """Where they go; empty: `selected.jsonl` in the run folder."""


@unread(NO_TRAINING, "async_save")
@unread(NO_EPOCHS, "total_epochs")
@unread(NO_VALIDATION, "test_freq", "val_before_train")
@dataclass(kw_only=True)
class BestOfNTrainerConfig(TrainerConfig):
    """The run: length, devices, folder."""

    cls: str = key("trainer.best_of_n.step.BestOfNTrainer", allows="a dotted path")
    """Dotted path of the trainer: BestOfNTrainer, or a subclass that overrides its step or hooks.
    """
    total_training_steps: int | None = key(
        None, above=0, hint="or null for all prompts", may_change_on_resume=True
    )
    """Steps of the whole run, if it shall end before the last prompt."""
    experiment_name: str = key("best_of_n", allows="a name", may_change_on_resume=True)
    """Second part of the run folder's name."""
    save_freq: int = key(
        1, above=0, or_exactly=-1, hint="or -1 for no checkpoints", may_change_on_resume=True
    )
    """Steps after which a killed run can go on; they hold a position, and no weights."""
    max_ckpt_to_keep: int | None = key(
        1, at_least=1, hint="or null to keep all", may_change_on_resume=True
    )
    """Committed checkpoints that stay in the run folder; null keeps all."""


@dataclass(kw_only=True)
class SamplingOnlyConfig(RunConfig):
    """A run that samples and scores, and trains nothing."""

    data: PromptsConfig = key(factory=PromptsConfig)
    """Prompts."""
    actor_rollout_ref: SampledPolicyConfig = key(factory=SampledPolicyConfig)
    """Policy."""
    rewards: list[RewardConfig] = key(factory=list, allows="a list of sections")
    """Any number of rewards, added up by weight; in place of the two sections that follow."""
    custom_reward_function: RewardFunctionConfig = key(
        factory=RewardFunctionConfig, read_when=NO_REWARD_LIST
    )
    """Rule rewards by a function of the user's; without one, the rule of each row's data_source."""
    reward_model: RewardModelConfig = key(factory=RewardModelConfig)
    """Scores."""
    reward: ScoringConfig = key(factory=ScoringConfig)
    """Failures, and the sandbox of reward functions."""


@dataclass(kw_only=True)
class BestOfNConfig(SamplingOnlyConfig):
    """A run that samples, scores and selects."""

    selection: SelectionConfig = key(factory=SelectionConfig)
    """Which samples are kept."""
    trainer: BestOfNTrainerConfig = key(factory=BestOfNTrainerConfig)
    """The run."""
