"""A trainer that records the roles' weights, and a user's own role. Ray's workers import them."""

from __future__ import annotations

from typing import Any

import torch

from trainer.ppo.config import PPOConfig
from trainer.ppo.stages import PPOTrainer
from trainer.run_state import Metrics
from verl_like import DataProto, Dispatch, Worker, register
from workers.columns import read_columns, write_columns
from workers.rewards.weighted import place_at_last_token


class RecordingTrainer(PPOTrainer):
    """Stores the weights' hash of every role after each sync."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.history: list[dict[str, set[str]]] = []
        RecordingTrainer.last = self
        send_next = self.weights.send_next

        def send_and_record() -> Metrics:
            metrics = send_next()
            self.history.append(
                {role: set(self.groups[role].weights_checksum()) for role in self.groups}
            )
            return metrics

        self.weights.send_next = send_and_record  # type: ignore[method-assign]


class LengthVerifier(Worker):
    """A user's own role: one point for a response of even length."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Nothing to build."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
    def verify(self, batch: DataProto) -> DataProto:
        lengths = batch.batch["response_mask"].sum(-1)
        return DataProto.from_dict({"even": (lengths % 2 == 0).float()})


class VerifiedTrainer(PPOTrainer):
    """Adds the verifier's point to the score of every sample."""

    def score(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        verified = self.groups["verifier"].verify.remote(batch)
        batch, metrics = super().score(batch)
        points = verified.get().batch["even"]
        read = read_columns(batch, "token_level_scores", "response_mask")
        scores = read["token_level_scores"] + place_at_last_token(
            points, read["response_mask"].bool()
        )
        write_columns(batch, token_level_scores=scores)
        return batch, metrics | {"verifier/mean": float(torch.mean(points))}
