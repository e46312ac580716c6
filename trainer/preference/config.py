"""The whole configuration tree of preference training."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.config import ValidatingTrainerConfig
from trainer.rows.config import RowConfig
from verl_like.config_key import key
from workers.config.preference import PreferenceWorkerConfig


@dataclass(kw_only=True)
class PreferenceTrainerConfig(ValidatingTrainerConfig):
    """The run: length, devices, folder."""

    cls: str = key("trainer.preference.step.PreferenceTrainer", allows="a dotted path")
    """Dotted path of the trainer: PreferenceTrainer, or a subclass that overrides its step or
    hooks.
    """
    experiment_name: str = key("dpo", allows="a name", may_change_on_resume=True)
    """Second part of the run folder's name."""


@dataclass(kw_only=True)
class PreferenceConfig(RowConfig, PreferenceWorkerConfig):
    """A run of preference training."""

    trainer: PreferenceTrainerConfig = key(factory=PreferenceTrainerConfig)
    """The run."""
