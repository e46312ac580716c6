"""The models that a recipe on rows has, and how long its rows are."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.model_config import num_positions, read_model_config
from trainer.rows.config import RowConfig
from workers.config import ModelConfig
from workers.config.rows import LONGEST_ROW
from workers.models.causal_lm import Head
from workers.parallel.sharding import Sharding


@dataclass(frozen=True)
class RowModel:
    """The model of a role."""

    key: str
    """The key that names it."""
    model: ModelConfig
    sharding: Sharding
    head: Head = "token"
    trains: bool = True


def longest_row(config: RowConfig) -> int:
    """Tokens that a row is cut to: by default all that the model takes, but for very long ones."""
    if config.data.max_length is not None:
        return config.data.max_length
    limit = num_positions(read_model_config("model.path", config.model.path))
    return min(LONGEST_ROW, limit or LONGEST_ROW)
