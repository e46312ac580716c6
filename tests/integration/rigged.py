"""Workers and trainers that fail or record events. Worker processes import them from here."""

from __future__ import annotations

import time
from typing import Any

import torch

from trainer.ppo.stages import PPOTrainer
from trainer.run_state import Metrics
from verl_like import DataProto, Dispatch, register
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.rollout import RolloutWorker

SLOW_S = 1.0


class FailingCritic(CriticWorker):
    """Fails in its first update."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_critic(self, data: DataProto) -> dict[str, Any]:
        raise FloatingPointError("the critic is broken")


class FailingActor(ActorWorker):
    """Fails in its first update, later than the critic."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto) -> dict[str, Any]:
        time.sleep(SLOW_S)
        raise ArithmeticError("the actor is broken too")


class TruncatingRollout(RolloutWorker):
    """Every third response is empty, and no response ends with eos."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, readonly=True)
    def generate_sequences(self, data: DataProto) -> DataProto:
        batch = super().generate_sequences(data)
        width = batch.batch["responses"].shape[1]
        lengths = torch.where(torch.arange(len(batch)) % 3 == 0, 0, width)
        mask = (torch.arange(width) < lengths[:, None]).long()
        token = int(data.batch["input_ids"][0, -1])  # any token but eos
        batch.pop(["sample_hash"])  # the engine drew other tokens
        batch.batch["responses"] = torch.full_like(batch.batch["responses"], token)
        batch.batch["response_mask"] = mask
        batch.batch["attention_mask"][:, -width:] = mask
        batch.batch["input_ids"][:, -width:] = batch.batch["responses"]
        batch.batch["rollout_log_probs"] = batch.batch["rollout_log_probs"] * mask
        return batch


class NotedTrainer(PPOTrainer):
    """Records the hooks in the order of their calls, and the samples of the last step."""

    notes: list[str]
    batch: DataProto

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        NotedTrainer.notes = []

    def on_init_end(self) -> None:
        self.notes.append("init_end")

    def on_train_begin(self) -> None:
        self.notes.append("train_begin")

    def on_step_begin(self) -> None:
        self.notes.append(f"step_begin {self.global_step}")

    def on_sample_begin(self) -> None:
        self.notes.append("sample_begin")

    def on_sample_end(self, batch: DataProto) -> None:
        self.notes.append(f"sample_end {len(batch)}")

    def on_validate_begin(self) -> None:
        self.notes.append("validate_begin")

    def on_validate_end(self, metrics: Metrics) -> None:
        self.notes.append("validate_end")

    def on_step_end(self, metrics: Metrics) -> None:
        self.notes.append(f"step_end {self.global_step}")
        metrics["mine"] = 42.0

    def on_train_end(self) -> None:
        self.notes.append("train_end")

    def update(self, batch: DataProto) -> Metrics:
        NotedTrainer.batch = batch
        return super().update(batch)
