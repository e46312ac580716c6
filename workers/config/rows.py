"""The workers' part of supervised recipes: model, optimizer, rows, loss, reference."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from verl_like.config_key import ReadWhen, Section, config_field, entry_takes, unless, when
from verl_like.registry import get_registry
from workers.config.conditions import VALIDATION_IS_ON
from workers.config.model import (
    CheckpointConfig,
    FrozenFSDPConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ShardedConfig,
)

LONGEST_ROW = 1024
"""Default length in tokens to which rows are truncated, unless the model has fewer positions."""


@dataclass(kw_only=True)
class RowDataConfig(Section):
    """The rows: their files, number per step, and longest length."""

    train_files: Any = config_field(
        "", allows="a file, or a list", required="set a file of rows, or a list of files"
    )
    """Parquet, JSONL or CSV files of the recipe's rows."""
    val_files: Any = config_field(
        "", allows="a file, or a list", read_when=VALIDATION_IS_ON, may_change_on_resume=True
    )
    """Validation files; an empty value disables validation."""
    train_batch_size: int = config_field(64, above=0)
    """Rows per optimizer step, over all ranks."""
    max_length: int | None = config_field(None, above=1, hint="or null for at most 1,024")
    """Length in tokens to which rows are truncated; null: the model's positions, at most 1,024."""
    on_bad_row: str = config_field("error", choices=("error", "skip"))
    """Invalid rows. `error`: stop the run; `skip`: leave them out and count them."""
    use_dynamic_bsz: bool = config_field(True, may_change_on_resume=True)
    """Limit micro-batches by tokens instead of rows."""
    max_token_len_per_gpu: int = config_field(
        16384,
        allows="max_length, or more",
        read_when=when("use_dynamic_bsz"),
        may_change_on_resume=True,
    )
    """Tokens per micro-batch and rank; with padding, if rows are not packed."""
    micro_batch_size_per_gpu: int = config_field(
        8, above=0, read_when=when("use_dynamic_bsz", False), may_change_on_resume=True
    )
    """Rows per micro-batch and rank."""


@dataclass(kw_only=True)
class TrainedModelConfig(ModelConfig, ShardedConfig):
    """The trained model, and its distribution over ranks."""

    SECTION = "model"

    fsdp_config: FSDPConfig = config_field(factory=FSDPConfig)
    """FSDP settings that add to `strategy`, without contradicting it."""


@dataclass(kw_only=True)
class RowWorkerConfig(Section):
    """Sections that the workers of supervised recipes read."""

    model: TrainedModelConfig = config_field(factory=TrainedModelConfig)
    """The model, its adapter and its precision."""
    parallel: ParallelConfig = config_field(factory=ParallelConfig)
    """Sizes of the parallel axes."""
    optim: OptimConfig = config_field(factory=lambda: OptimConfig(lr=1e-5))
    """Optimizer, learning rate and schedule."""
    grad_clip: float = config_field(1.0, above=0)
    """Gradients are clipped to this norm."""
    data: RowDataConfig = config_field(factory=RowDataConfig)
    """The rows: their files, number per step, and longest length."""
    checkpoint: CheckpointConfig = config_field(factory=CheckpointConfig)
    """What a checkpoint of the model contains."""


SCORE_AT = ("last_token", "legacy_mean")
"""Ways to compute a row's score: from its last token, or as the mean over its tokens."""


@dataclass(kw_only=True)
class RewardModelTrainingConfig(RowWorkerConfig):
    """Keys of reward-model training: the model, the loss of its scores, and where it scores."""

    loss: str = config_field("log_sigmoid", registry="reward-model loss")
    """Loss, as a function of chosen score - rejected score - margin."""
    center_coef: float = config_field(0.0, at_least=0)
    """Weight of (chosen score + rejected score)², which keeps scores near zero; 0 disables it."""
    score_at: str | None = config_field(None, choices=SCORE_AT)
    """Score at the last token, or the mean over tokens; null: as in the model folder, otherwise
    last_token.
    """


def loss_reads(run: Any, name: str) -> bool:
    """True if the loss of this run has a parameter of that name."""
    loss = get_registry("preference loss").look_up(run.loss)
    return name in inspect.signature(loss).parameters


def has_reference(run: Any) -> bool:
    """True if the loss of this run needs a reference."""
    return loss_reads(run, "ref_log_probs") and not run.reference_free


def has_sft_length(run: Any) -> bool:
    """True if the SFT loss of this run is a mean over all tokens of a step."""
    is_over_tokens = run.sft_agg_mode == "token-mean" and not loss_reads(run, "desirable")
    return bool(run.sft_coef) and is_over_tokens


def takes(name: str) -> ReadWhen:
    """Return the condition that the run's loss has a parameter of that name."""
    return entry_takes(name, "preference loss", "loss")


LEARNS_PAIRS = ReadWhen(
    "the loss learns pairs",
    lambda _, run: not loss_reads(run, "desirable"),
    "the loss learns rows with a label, not pairs",
)
HAS_REFERENCE = ReadWhen(
    "the loss uses a reference model",
    lambda _, run: has_reference(run),
    "the loss uses no reference model",
)
MAY_BE_REFERENCE_FREE = ReadWhen(
    "the loss compares pairs with a reference",
    lambda _, run: loss_reads(run, "ref_log_probs") and not loss_reads(run, "desirable"),
    "the loss compares no pairs with a reference",
)
REFERENCE_IS_APART = unless("ref.model.path")


@dataclass(kw_only=True)
class ReferenceModelConfig(Section):
    """The weights of the reference model."""

    path: str | None = config_field(None, allows="a folder or a name", hint="or null")
    """Model folder or hub name, with the tokenizer of `model.path`; null: the initial model."""


@dataclass(kw_only=True)
class ReferenceConfig(Section):
    """The frozen reference model of the loss; its other settings are those of `model`."""

    model: ReferenceModelConfig = config_field(factory=ReferenceModelConfig)
    """The weights of the reference."""
    fsdp_config: FrozenFSDPConfig = config_field(
        factory=FrozenFSDPConfig, read_when=REFERENCE_IS_APART
    )
    """FSDP settings that add to `strategy`, without contradicting it."""


@dataclass(kw_only=True)
class PreferenceWorkerConfig(RowWorkerConfig):
    """Sections that the workers of preference training read."""

    loss: str = config_field("dpo", registry="preference loss")
    """Preference loss, or the dotted path of your own."""
    beta: float = config_field(0.1, above=0, read_when=takes("beta"))
    """Scale of log-ratios; the SimPO paper uses 2 and more."""
    label_smoothing: float = config_field(
        0.0, at_least=0, below=0.5, read_when=takes("label_smoothing")
    )
    """Assumed fraction of pairs whose sides are swapped; 0 disables the smoothing."""
    simpo_gamma: float = config_field(0.5, at_least=0, read_when=takes("simpo_gamma"))
    """simpo's target margin of rewards."""
    orpo_lambda: float = config_field(0.1, at_least=0, read_when=takes("orpo_lambda"))
    """Weight of the odds ratio, next to the SFT loss."""
    desirable_weight: float = config_field(1.0, at_least=0, read_when=takes("desirable_weight"))
    """Weight of good responses."""
    undesirable_weight: float = config_field(1.0, at_least=0, read_when=takes("undesirable_weight"))
    """Weight of bad responses."""
    sft_coef: float = config_field(0.0, at_least=0, read_when=LEARNS_PAIRS)
    """Weight of the SFT loss of the chosen response; 0 disables it."""
    sft_agg_mode: str = config_field(
        "seq-mean-token-mean",
        choices=("seq-mean-token-mean", "token-mean"),
        read_when=(LEARNS_PAIRS, unless("sft_coef", 0)),
    )
    """Average of the SFT loss: over responses of the mean over tokens, or, as in TRL, over all
    tokens of a step's chosen responses.
    """
    reference_free: bool = config_field(False, read_when=MAY_BE_REFERENCE_FREE)
    """Use a uniform reference instead of a model."""
    ref: ReferenceConfig = config_field(factory=ReferenceConfig, read_when=HAS_REFERENCE)
    """The frozen reference model."""
