"""A second recipe: a student learns a line from a teacher, without tokens, models or prompts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config.recipe import Recipe, presets
from trainer.config.schema import RunConfig
from trainer.loop import Metrics, Trainer
from trainer.run_folder.metrics import reduce_metrics
from verl_like import DataProto, Dispatch, Worker, register


@dataclass(kw_only=True)
class RegressionConfig(RunConfig):
    lr: float = 0.1
    """Learning rate of the student."""


class LineWorker(Worker):
    def __init__(self, config: RegressionConfig) -> None:
        torch.manual_seed(config.trainer.seed + sum(map(ord, self.role)))
        self.line = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.Adam(self.line.parameters(), lr=config.lr)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Nothing to load."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def label(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"y": self.line(batch.batch["x"]).detach()})

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def update(self, batch: DataProto) -> Metrics:
        loss = (self.line(batch.batch["x"]) - batch.batch["y"]).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"student/loss": loss.item()}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, step: int = 0) -> None:
        super().save_checkpoint(path, step)
        torch.save([self.line.state_dict(), self.optimizer.state_dict()], Path(path) / "line.pt")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        super().load_checkpoint(path)
        line, optimizer = torch.load(Path(path) / "line.pt")
        self.line.load_state_dict(line)
        self.optimizer.load_state_dict(optimizer)


class RegressionTrainer(Trainer):
    stages = ("label", "update")
    concurrent_stages = ("update",)

    def __init__(self, config: RegressionConfig, groups: Any) -> None:
        super().__init__(config, groups)
        torch.manual_seed(config.trainer.seed)

    @property
    def total_steps(self) -> int:
        return self.config.trainer.total_training_steps

    def step(self) -> Metrics:
        batch = DataProto.from_dict({"x": torch.randn(8, 3)})
        with self.clock("label"):
            batch = batch.union(self.groups["teacher"].label(batch))
        with self.clock("update"):
            return reduce_metrics(self.groups["student"].update(batch))


SPLIT = presets({"teacher_pool": ["teacher"], "student_pool": ["student"]})
REGRESSION = Recipe("regression", RegressionConfig, Path(__file__).parent, "regression", SPLIT)
