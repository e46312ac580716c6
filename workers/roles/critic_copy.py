"""A frozen copy of the critic, which predicts values where samples are generated.

Each generator of an asynchronous run that scores its samples has a copy
(`async_training.score_on=generator`). It receives the critic's weights version by version, as a
rollout receives the actor's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import register
from verl_like.errors import WeightSyncError
from workers.columns import SEQUENCES, batch_columns
from workers.memory import HeldModel
from workers.roles.critic import CriticWorker, value_budget
from workers.roles.model_worker import TRAIN, VERB, ModelWorker
from workers.training.average import MovingAverageEngine
from workers.weights.receiver import WeightReceiver

if TYPE_CHECKING:
    from workers.config import WorkersConfig


class CriticCopyWorker(WeightReceiver, ModelWorker):
    """Predicts values with one version of the critic's weights; the first delivery brings one."""

    engine: MovingAverageEngine

    def __init__(self, config: WorkersConfig) -> None:
        super().__init__()
        self.budget = value_budget(config)
        self.engine = self.engine_of(self.held_model(config), MovingAverageEngine, decay=0.0)

    @classmethod
    def held_model(cls, config: WorkersConfig, role: str = "critic_copy") -> HeldModel:
        """Return the critic's model, frozen, on its own ranks without the critic's axes."""
        model = CriticWorker.held_model(config)
        fsdp = replace(model.fsdp, fsdp_size=-1)
        return replace(model, trains=False, saved=(), fsdp=fsdp, parallel=None)

    @register(dispatch_mode=TRAIN, readonly=True)
    @batch_columns(reads=SEQUENCES, scores_as="values")
    def compute_values(self, data: DataProto) -> DataProto:
        """Return `values`, and `value_version`, the version of the weights."""
        columns = self.forward(data)
        version = torch.full((len(data),), self.engine.version)
        return DataProto.from_dict({**columns.columns, "value_version": version})

    @register(dispatch_mode=VERB, readonly=True)
    def forward(self, data: DataProto, wanted: Sequence[str] = ()) -> DataProto:
        """Return the values under the version that was delivered last."""
        if self.engine.version is None:
            raise WeightSyncError(
                f"{self.role}: this copy of the critic holds no version of its weights; it was "
                "sent none, or a rank has rejected them. deliver_weights(critic_group, copy_group) "
                "brings them."
            )
        return super().forward(data, wanted)
