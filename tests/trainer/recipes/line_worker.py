"""The toy worker of the regression recipe, for the student and for the teacher."""

from pathlib import Path
from typing import Any

import torch

from trainer.run_state import Metrics
from verl_like import DataProto, Dispatch, Worker, register


class LineWorker(Worker):
    def __init__(self, config: Any) -> None:
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
