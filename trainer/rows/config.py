"""The configuration tree that recipes on rows extend."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema import RunConfig
from workers.config.rows import RowWorkerConfig


@dataclass(kw_only=True)
class RowConfig(RunConfig, RowWorkerConfig):
    """A run, and the model that it trains on rows."""
