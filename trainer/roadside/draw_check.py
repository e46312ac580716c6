"""Check by the engine's hashes that an update trains on the tokens that the rollout sampled."""

from __future__ import annotations

from typing import Any

from verl_like.batch.protocol import DataProto
from workers.rollout.draws import check_draws


class DrawCheck:
    """Raises `BatchError` if a stage or hook has changed sampled tokens."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Check the input of the update."""
        if stage == "update" and batch is not None:
            self._metrics = check_draws(batch)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Report how many samples were verified."""
        metrics |= self._metrics
        self._metrics = {}
