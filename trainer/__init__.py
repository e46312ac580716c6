"""The driver: recipes, their loop, and their configuration. Names are imported on first use.

`trainer.ppo.stages` is PPO; `trainer.loop` is the loop that all recipes share. `trainer.api` has
the classes that start runs from Python, such as `GRPO`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.api.recipes import DPO, GRPO, KTO, PPO, SFT, AsyncPPO, RewardTraining
    from trainer.config.flat import config_hash
    from trainer.groups.worker_groups import WorkerGroups
    from trainer.launch import run
    from trainer.loop import Trainer
    from trainer.ppo.config import PPOConfig
    from trainer.ppo.recipe import load_config
    from trainer.ppo.stages import PPOTrainer
    from trainer.run_folder.result import RunResult

__all__ = [
    "AsyncPPO",
    "DPO",
    "GRPO",
    "KTO",
    "PPO",
    "PPOConfig",
    "PPOTrainer",
    "RewardTraining",
    "RunResult",
    "SFT",
    "Trainer",
    "WorkerGroups",
    "config_hash",
    "load_config",
    "run",
]
_MODULE_OF = {
    "DPO": "api.recipes",
    "AsyncPPO": "api.recipes",
    "GRPO": "api.recipes",
    "KTO": "api.recipes",
    "PPO": "api.recipes",
    "PPOConfig": "ppo.config",
    "PPOTrainer": "ppo.stages",
    "RewardTraining": "api.recipes",
    "RunResult": "run_folder.result",
    "SFT": "api.recipes",
    "Trainer": "loop",
    "WorkerGroups": "groups.worker_groups",
    "config_hash": "config.flat",
    "load_config": "ppo.recipe",
    "run": "launch",
}


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'trainer' has no attribute '{name}'")
    return getattr(importlib.import_module(f"trainer.{_MODULE_OF[name]}"), name)
