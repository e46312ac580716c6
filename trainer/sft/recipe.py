"""usage: verl-like sft data.train_files=FILE model.path=FOLDER [key=value ...]

Trains a model on chats (loss on the assistant's turns), prompts with responses,
or plain text. The rows of the file (Parquet, JSONL or CSV) have these forms:

  {"messages": [{"role": "user", "content": "Hi"},
                {"role": "assistant", "content": "Hello"}]}
  {"prompt": "Hi", "response": "Hello"}      (or "completion", as in TRL)
  {"text": "Hello"}

  data.max_length=2048           tokens per row; longer rows are cut (default:
                                 1024, or fewer if the model is shorter)
  data.train_batch_size=64       rows per optimizer step (default: 64)
  trainer.total_epochs=1         passes over the rows (default: 1)
  optim.lr=1e-5                  learning rate (default: 1e-5)
  model.lora_rank=32             train a LoRA adapter, to save memory
  trainer.default_local_dir=DIR  run folder, with the model in DIR/model; the
                                 same command resumes the run
  trainer.save_freq=100          steps between checkpoints; also every 30 min
  checkpoint.save_contents=[model,optimizer,extra,hf_model]
  verl-like sft --cfg all        every key with its meaning

Placement works as in `verl-like ppo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.config.schema import Recipe, placement_presets
from trainer.data.config import ValidatingTrainerConfig
from trainer.rows.config import OPTIMIZERS, RowConfig, check_rows_config, trainer_section
from verl_like.config_key import config_field
from workers.config.rows import RowDataConfig


@dataclass(kw_only=True)
class SFTDataConfig(RowDataConfig):
    """Texts, responses and chats: files, sizes, lengths."""

    loss_on: str = config_field("response", choices=("response", "all"))
    """Tokens in the loss: the responses, or with `all` also prompts and other turns."""


@dataclass(kw_only=True)
class SFTConfig(RowConfig):
    """A run of supervised fine-tuning."""

    trainer: ValidatingTrainerConfig = trainer_section("trainer.sft.step.SFTTrainer", "sft")
    """Length, devices, checkpoints and logging of the run."""
    data: SFTDataConfig = config_field(factory=SFTDataConfig)
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
