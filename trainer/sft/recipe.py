"""usage: verl-like sft data.train_files=FILE model.path=FOLDER [key=value ...]

Trains a model on chats (loss on what the assistant says), prompts with responses, or plain text.
Placement, run folder, checkpoints and resume are those of `verl-like ppo`.

  verl-like sft --cfg all           every key with its meaning
  trainer.dry_run=true              check everything, and stop before a process starts
  checkpoint.save_contents=[model,optimizer,extra,hf_model]  trainer.save_freq=100
"""

from __future__ import annotations

from pathlib import Path

from trainer.config.recipe import Recipe, presets
from trainer.rows.recipe import check_rows_config, load_registries
from trainer.sft.config import SFTConfig

SFT = Recipe(
    name="sft",
    schema=SFTConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="sft_trainer",
    placements=presets({"global_pool": ["sft"]}),
    load_registries=load_registries,
    checks=(check_rows_config,),
)
