"""The configuration tree that recipes on rows extend."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema import RunConfig
from verl_like.config_key import key
from workers.config.rows import RowDataConfig, RowWorkerConfig


@dataclass(kw_only=True)
class SkippableRowDataConfig(RowDataConfig):
    """Rows of which bad ones may be left out."""

    on_bad_row: str = key("error", choices=("error", "skip"))
    """A row that is none (columns, an empty response, equal ones): error, or skip and count it."""


@dataclass(kw_only=True)
class RowConfig(RunConfig, RowWorkerConfig):
    """A run, and the model that it trains on rows."""
