"""A second recipe: a student learns a line from a teacher, without tokens, models or prompts."""

from dataclasses import dataclass
from pathlib import Path

import torch

from trainer.config.schema import Recipe, RunConfig, placement_presets
from trainer.loop import Trainer
from trainer.run_folder.metrics import reduce_metrics
from trainer.run_state import Metrics, Run, RunRecipe
from verl_like import DataProto


@dataclass(kw_only=True)
class RegressionConfig(RunConfig):
    lr: float = 0.1
    """Learning rate of the student."""


class RegressionTrainer(Trainer):
    recipe = RunRecipe(stages=("label", "update"), concurrent_stages=("update",))

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        torch.manual_seed(self.config.trainer.seed)

    @property
    def total_steps(self) -> int:
        return self.config.trainer.total_training_steps

    def step(self) -> Metrics:
        batch = DataProto.from_dict({"x": torch.randn(8, 3)})
        with self.clock("label"):
            batch = batch.union(self.groups["teacher"].label(batch))
        with self.clock("update"):
            return reduce_metrics(self.groups["student"].update(batch))


SPLIT = placement_presets({"teacher_pool": ["teacher"], "student_pool": ["student"]})
REGRESSION = Recipe("regression", RegressionConfig, Path(__file__).parent, "regression", SPLIT)
