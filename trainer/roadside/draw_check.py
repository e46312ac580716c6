"""Check that what an update trains on is what the rollout drew, by the hashes of its engine."""

from __future__ import annotations

from typing import Any

from verl_like.batch.protocol import DataProto
from workers.rollout.draws import check_draws


class DrawCheck:
    """Raises `BatchError` where a stage or hook has changed drawn tokens."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Check the batch that goes into the update."""
        if stage == "update" and batch is not None:
            self._metrics = check_draws(batch)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Say how many samples were proven."""
        metrics |= self._metrics
        self._metrics = {}
