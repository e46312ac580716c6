"""The driver: the order of things. Read `trainer.ppo` first. Names are imported on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.compose import load_config
    from trainer.config import PPOConfig
    from trainer.ppo import PPOTrainer
    from trainer.roles import WorkerGroups
    from trainer.start import run

__all__ = ["PPOConfig", "PPOTrainer", "WorkerGroups", "load_config", "run"]
_HOME = {"PPOConfig": "config", "PPOTrainer": "ppo", "WorkerGroups": "roles", "load_config": "compose", "run": "start"}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    return getattr(importlib.import_module(f"trainer.{_HOME[name]}"), name)
