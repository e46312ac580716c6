"""usage: verl-like dpo data.train_files=FILE model.path=FOLDER [key=value ...]

Trains a model on preferences. The rows of the file (Parquet, JSONL or CSV) are
pairs or, with loss=kto, responses with a label:

  {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}
  {"prompt": "Hi", "response": "Hello", "label": true}

The reference is the model before training, or ref.model.path. Its log-probs are
computed once per run.

  loss=dpo|ipo|hinge|kto|orpo|simpo  orpo and simpo have no reference
  beta=0.1                       weight of the log-ratios (default: 0.1)
  data.max_length=2048           tokens per row; longer rows are cut (default:
                                 1024, or fewer if the model is shorter)
  data.train_batch_size=64       rows per optimizer step (default: 64)
  trainer.total_epochs=1         passes over the rows (default: 1)
  optim.lr=1e-6                  learning rate (default: 1e-5; usual: 1e-6)
  model.lora_rank=32             train a LoRA adapter, to save memory
  label_smoothing=0.1            dpo for noisy labels (cDPO)
  reference_free=true            without the reference
  sft_coef=0.1                   weight of an SFT loss on chosen responses
  trainer.default_local_dir=DIR  run folder, with the model in DIR/model
  trainer.save_freq=100          steps between checkpoints; also every 30 min
  verl-like dpo --cfg all        every key with its meaning

Placement and resume work as in `verl-like ppo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import Recipe, placement_presets
from trainer.data.config import ValidatingTrainerConfig
from trainer.rows import config as rows
from trainer.rows.config import RowConfig
from verl_like.config_key import config_field
from verl_like.errors import ConfigError
from verl_like.registry import get_registry
from workers.config.rows import PreferenceWorkerConfig, RowDataConfig, has_reference, loss_reads


@dataclass(kw_only=True)
class PreferenceConfig(RowConfig, PreferenceWorkerConfig):
    """A run of preference training."""

    data: RowDataConfig = config_field(factory=RowDataConfig)
    """Training rows: files, columns and lengths."""
    trainer: ValidatingTrainerConfig = rows.trainer_section(
        "trainer.preference.step.PreferenceTrainer", "dpo"
    )
    """Length, devices, checkpoints and logging of the run."""

    @property
    def num_sides(self) -> int:
        """Rows per item of the data: 2 for pairs, 1 for labeled responses."""
        return 1 if loss_reads(self, "desirable") else 2


def inactive_roles(config: Any) -> dict[str, str]:
    """Map the role of the reference to the reason, if the run does not need it."""
    if not has_reference(config):
        free = (
            "reference_free=true: there is" if config.reference_free else f"loss={config.loss} has"
        )
        return {"ref": f"{free} no reference"}
    if config.ref.model.path is None:
        return {"ref": "without ref.model.path the reference is the model itself, before training"}
    return {}


def check_preference_config(config: PreferenceConfig) -> None:
    """Run the checks across keys that only this recipe has."""
    if config.desirable_weight == config.undesirable_weight == 0:
        raise ConfigError(
            "desirable_weight=0 and undesirable_weight=0: nothing would be learned. Raise one "
            "of them."
        )
    # a user's loss may only have parameters that the run can fill
    from workers.losses.preference import COLUMNS, parameters_of

    numbers = [name for name, value in vars(config).items() if isinstance(value, int | float)]
    known = [*COLUMNS, *numbers]
    parameters = parameters_of(get_registry("preference loss").look_up(config.loss))
    if "desirable" in parameters and "ref_log_probs" not in parameters:
        raise ConfigError(
            f"loss={config.loss} has the parameter 'desirable' but not 'ref_log_probs': rows with "
            "a label are compared with a reference. Add the parameter 'ref_log_probs'."
        )
    unknown = [name for name in parameters if name not in known]
    if unknown:
        raise ConfigError(
            f"loss={config.loss} has an unknown parameter {unknown[0]!r}. Known columns and "
            f"settings: {', '.join(known)}."
        )


DPO = Recipe(
    name="dpo",
    schema=PreferenceConfig,
    config_dir=Path(__file__).resolve().parent,
    config_name="preference_trainer",
    placements=placement_presets({"preference_pool": ["preference"], "ref_pool": ["ref"]}),
    inactive_roles=inactive_roles,
    registries=("workers.losses.preference", rows.OPTIMIZERS),
    checks=(rows.check_rows_config, check_preference_config),
)
