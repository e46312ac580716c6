"""usage: verl-like reward-model data.train_files=FILE model.path=FOLDER
           [key=value ...]

Trains a reward model on pairs of responses with their prompt, or on pairs of
whole dialogues. A row can have a margin. The file is Parquet, JSONL or CSV:

  {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away", "margin": 1.5}

  loss=log_sigmoid|log_exp       loss of the pairs (default: log_sigmoid)
  center_coef=0.01               keep scores near zero (default: 0, off)
  data.max_length=2048           tokens per row; longer rows are cut (default:
                                 1024, or fewer if the model is shorter)
  data.train_batch_size=64       pairs per optimizer step (default: 64)
  trainer.total_epochs=1         passes over the pairs (default: 1)
  optim.lr=1e-5                  learning rate (default: 1e-5)
  trainer.default_local_dir=DIR  run folder, with the model in DIR/model
  trainer.save_freq=100          steps between checkpoints; also every 30 min
  checkpoint.save_contents=[model,optimizer,extra,hf_model]
  verl-like reward-model --cfg all  every key with its meaning

Placement and resume work as in `verl-like ppo`, whose reward.model.path and
critic.model.path load the trained model's folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainer.config.schema import Recipe, placement_presets
from trainer.data.config import ValidatingTrainerConfig
from trainer.rows import config as rows
from trainer.rows.config import RowConfig
from workers.config.rows import RewardModelTrainingConfig


@dataclass(kw_only=True)
class RewardModelRunConfig(RowConfig, RewardModelTrainingConfig):
    """A run that trains a reward model."""

    trainer: ValidatingTrainerConfig = rows.trainer_section(
        "trainer.reward_model.step.RewardModelTrainer", "reward_model"
    )
    """Length, devices, checkpoints and logging of the run."""

    @property
    def num_sides(self) -> int:
        """Rows per item of the data, which is a pair."""
        return 2


REWARD_MODEL = Recipe(
    name="reward-model",
    schema=RewardModelRunConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="reward_model_trainer",
    placements=placement_presets({"global_pool": ["reward_model"]}),
    registries=("workers.losses.preference", rows.OPTIMIZERS),
    checks=(rows.check_rows_config,),
)
