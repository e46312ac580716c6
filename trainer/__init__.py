"""The driver: recipes, their loop, and their configuration. Names are imported on first use.

`trainer.ppo.stages` is PPO; `trainer.loop` is the loop that all recipes share. `trainer.api` has
the classes that start runs from Python, such as `GRPO`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.lazy import import_name, names_by_block

if TYPE_CHECKING:  # `X as X` tells type checkers that the name is public
    from trainer.api.recipes import DPO as DPO
    from trainer.api.recipes import GRPO as GRPO
    from trainer.api.recipes import KTO as KTO
    from trainer.api.recipes import PPO as PPO
    from trainer.api.recipes import SFT as SFT
    from trainer.api.recipes import AsyncPPO as AsyncPPO
    from trainer.api.recipes import RewardModelTraining as RewardModelTraining
    from trainer.config.keys import config_hash as config_hash
    from trainer.groups.worker_groups import WorkerGroups as WorkerGroups
    from trainer.launch import run as run
    from trainer.loop import Trainer as Trainer
    from trainer.ppo.config import PPOConfig as PPOConfig
    from trainer.ppo.recipe import load_config as load_config
    from trainer.ppo.stages import PPOTrainer as PPOTrainer
    from trainer.run_folder.result import RunResult as RunResult

[_MODULE_OF] = names_by_block(__file__)
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULE_OF, name)
