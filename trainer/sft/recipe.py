"""usage: verl-like sft data.train_files=FILE model.path=FOLDER [key=value ...]

Trains a model on chats (loss on the assistant's turns), prompts with responses, or plain text.
Placement, run folder, checkpoints and resume work as in `verl-like ppo`.

  verl-like sft --cfg all           every key with its meaning
  checkpoint.save_contents=[model,optimizer,extra,hf_model]  trainer.save_freq=100
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.config.recipe import Recipe, placement_presets
from trainer.data.config import ValidatingTrainerConfig
from trainer.rows.config import OPTIMIZERS, RowConfig, check_rows_config, trainer_section
from verl_like.config_key import key
from workers.config.rows import RowDataConfig


@dataclass(kw_only=True)
class SFTDataConfig(RowDataConfig):
    """Texts, responses and chats: files, sizes, lengths."""

    loss_on: str = key("response", choices=("response", "all"))
    """Tokens in the loss: the responses, or with `all` also prompts and other turns."""


@dataclass(kw_only=True)
class SFTConfig(RowConfig):
    """A run of supervised fine-tuning."""

    trainer: ValidatingTrainerConfig = trainer_section("trainer.sft.step.SFTTrainer", "sft")
    """Length, devices, checkpoints and logging of the run."""
    data: SFTDataConfig = key(factory=SFTDataConfig)
    """Training rows: files, columns and lengths."""


SFT = Recipe(
    name="sft",
    schema=SFTConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="sft_trainer",
    placements=placement_presets({"global_pool": ["sft"]}),
    registries=(OPTIMIZERS,),
    checks=(check_rows_config,),
)
