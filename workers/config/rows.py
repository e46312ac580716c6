"""The worker's part of a supervised recipe: model, optimizer, rows, checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import Section, key, when
from workers.config.conditions import VALIDATION_IS_ON
from workers.config.model import (
    CheckpointConfig,
    FSDPConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    ShardedConfig,
)

LONGEST_ROW = 1024
"""Default length, in tokens, that rows are cut to; less if the model has fewer positions."""


@dataclass(kw_only=True)
class RowDataConfig(Section):
    """Rows: files, sizes, how long they may be."""

    train_files: Any = key(
        "",
        allows="a file, or a list",
        required="give a file of rows, or a list of them",
    )
    """Parquet, JSONL or CSV files of the recipe's rows."""
    val_files: Any = key(
        "", allows="a file, or a list", read_when=VALIDATION_IS_ON, may_change_on_resume=True
    )
    """Validation files; empty: no validation."""
    train_batch_size: int = key(64, above=0)
    """Rows per optimizer step, over all ranks."""
    max_length: int | None = key(None, above=1, hint="or null for as many as the model takes")
    """Longest row in tokens; longer rows are cut. null: the model's positions, at most 1,024."""
    on_bad_row: str = key("error", choices=("error", "skip"))
    """Invalid rows: reject them, or skip and count them."""
    use_dynamic_bsz: bool = key(True, may_change_on_resume=True)
    """Size passes by tokens, not by rows."""
    max_token_len_per_gpu: int = key(
        16384,
        allows="max_length, or more",
        read_when=when("use_dynamic_bsz"),
        may_change_on_resume=True,
    )
    """Tokens per pass and rank, without padding."""
    micro_batch_size_per_gpu: int = key(
        8, above=0, read_when=when("use_dynamic_bsz", False), may_change_on_resume=True
    )
    """Rows per pass and rank."""


@dataclass(kw_only=True)
class TrainedModelConfig(ModelConfig, ShardedConfig):
    """The trained model, and its distribution over ranks."""

    fsdp_config: FSDPConfig = key(factory=FSDPConfig)
    """Sharding."""


@dataclass(kw_only=True)
class RowWorkerConfig(Section):
    """The part of the tree that the worker reads."""

    model: TrainedModelConfig = key(factory=TrainedModelConfig)
    """Model."""
    parallel: ParallelConfig = key(factory=ParallelConfig)
    """Axes."""
    optim: OptimConfig = key(factory=lambda: OptimConfig(lr=1e-5))
    """Optimizer."""
    grad_clip: float = key(1.0, above=0)
    """Largest gradient norm."""
    data: RowDataConfig = key(factory=RowDataConfig)
    """Rows."""
    checkpoint: CheckpointConfig = key(factory=CheckpointConfig)
    """Contents of checkpoints."""


SCORE_AT = ("last_token", "legacy_mean")
"""Positions at which a row's score may be read."""


@dataclass(kw_only=True)
class RewardTrainingConfig(RowWorkerConfig):
    """The model, and the loss of its scores."""

    loss: str = key("log_sigmoid", registry="pairwise loss")
    """Loss of the gap between a pair's scores."""
    center_coef: float = key(0.0, at_least=0)
    """Weight of (chosen score + rejected score)², which keeps scores near zero."""
    score_at: str | None = key(None, choices=SCORE_AT)
    """Score at the last token, or the mean over tokens; null: as in the model folder, otherwise
    last_token.
    """
