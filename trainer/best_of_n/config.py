"""The configuration tree of best-of-n.

Its sections are PPO's, so you can reuse a command's keys. Keys that only training or validation
reads are not read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from trainer.config.schema import RunConfig, TrainerConfig
from trainer.data.config import DataConfig
from verl_like.config_key import Section, key, when
from workers.config import ModelConfig, RolloutConfig, ScoringSections

NO_TRAINING = "this recipe trains nothing"
NO_EPOCHS = "this recipe takes every prompt once, in order"
NO_VALIDATION = "this recipe has no validations"
ONLY_IN_TRAINING = (
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding",
    "actor_rollout_ref.model.use_fused_kernels",
    "actor_rollout_ref.model.compile",
    "actor_rollout_ref.model.fp8_linear",
    "actor_rollout_ref.model.lora_rank",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    "trainer.async_save",
)


@dataclass(kw_only=True)
class SampledPolicyConfig(Section):
    """The policy that is sampled."""

    model: ModelConfig = key(factory=ModelConfig)
    """Model."""
    rollout: RolloutConfig = key(factory=partial(RolloutConfig, n=8))
    """Generation."""


@dataclass(kw_only=True)
class SelectionConfig(Section):
    """The samples to save, and their file."""

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
    cut: str = key("keep", choices=("keep", "drop"))
    """A sample that the length cut (`finish_reason` is length): keep it, and no end is taught after
    it; or drop and count it.
    """
    file: str = key(
        "", allows="a .parquet or .jsonl file, written when the run ends", may_change_on_resume=True
    )
    """Where they go; empty: `selected.jsonl` in the run folder."""


@dataclass(kw_only=True)
class SamplingOnlyConfig(RunConfig, ScoringSections):
    """A run that samples and scores without training."""

    data: DataConfig = key(factory=partial(DataConfig, train_batch_size=64))
    """Prompts: all of them once, in order, `train_batch_size` at a time."""
    actor_rollout_ref: SampledPolicyConfig = key(factory=SampledPolicyConfig)
    """Policy."""


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
    selection: SelectionConfig = key(factory=SelectionConfig)
    """Which samples are kept."""
    trainer: TrainerConfig = key(
        factory=partial(
            TrainerConfig,
            cls="trainer.best_of_n.step.BestOfNTrainer",
            experiment_name="best_of_n",
            save_freq=1,
            max_ckpt_to_keep=1,
        )
    )
    """The run; its checkpoints hold a position, and no weights."""
