"""The configuration of the prompts."""

from __future__ import annotations

from trainer.config.schema import DataConfig

__all__ = ["DataConfig"]
