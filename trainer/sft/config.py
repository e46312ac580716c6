"""The whole configuration tree of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.config import ValidatingTrainerConfig
from trainer.rows.config import RowConfig
from verl_like.config_key import key
from workers.config.rows import RowDataConfig


@dataclass(kw_only=True)
class SFTDataConfig(RowDataConfig):
    """Texts, responses and chats: files, sizes, how long they may be."""

    loss_on: str = key("response", choices=("response", "all"))
    """response: what a row's columns put into the loss. all: prompts and others' turns, too."""


@dataclass(kw_only=True)
class SFTTrainerConfig(ValidatingTrainerConfig):
    """The run: length, devices, folder."""

    cls: str = key("trainer.sft.step.SFTTrainer", allows="a dotted path")
    """Dotted path of the trainer: SFTTrainer, or a subclass that overrides its step or hooks."""
    experiment_name: str = key("sft", allows="a name", may_change_on_resume=True)
    """Second part of the run folder's name."""


@dataclass(kw_only=True)
class SFTConfig(RowConfig):
    """A run of supervised fine-tuning."""

    trainer: SFTTrainerConfig = key(factory=SFTTrainerConfig)
    """The run."""
    data: SFTDataConfig = key(factory=SFTDataConfig)
    """Rows."""
