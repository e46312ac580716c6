"""The whole configuration tree of reward-model training."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.config import ValidatingTrainerConfig
from trainer.rows.config import RowConfig
from verl_like.config_key import key
from workers.config.reward_training import RewardTrainingConfig


@dataclass(kw_only=True)
class RewardModelTrainerConfig(ValidatingTrainerConfig):
    """The run: length, devices, folder."""

    cls: str = key("trainer.reward_model.step.RewardModelTrainer", allows="a dotted path")
    """Dotted path of the trainer: RewardModelTrainer, or a subclass that overrides its step or
    hooks.
    """
    experiment_name: str = key("reward_model", allows="a name", may_change_on_resume=True)
    """Second part of the run folder's name."""


@dataclass(kw_only=True)
class RewardModelRunConfig(RowConfig, RewardTrainingConfig):
    """A run that trains a reward model."""

    trainer: RewardModelTrainerConfig = key(factory=RewardModelTrainerConfig)
    """The run."""
