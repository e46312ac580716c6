"""`rollouts/` of a run folder: the samples of a step as text, and their numbers.

A step's samples are written while its update runs on the workers.
"""

from __future__ import annotations

from typing import Any

from verl_like.batch.protocol import DataProto


class WrittenSamples:
    """Writes the samples of every step."""

    def __init__(self) -> None:
        self._waiting: DataProto | None = None
        """The step's samples until they are written."""
        self._metrics: dict[str, float] = {}

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Take the samples with their rewards and advantages."""
        if stage == "update":
            self._waiting = batch

    def on_update(self, trainer: Any, batch: DataProto) -> None:
        """Write the samples while the workers compute."""
        self._write(trainer)

    def on_stage_end(self, trainer: Any, stage: str, result: Any) -> None:
        """Write the samples now if a user's update has not called `on_update`."""
        if stage == "update":
            self._write(trainer)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Add the metrics of the samples."""
        metrics |= self._metrics
        self._metrics = {}

    def _write(self, trainer: Any) -> None:
        batch, self._waiting = self._waiting, None
        if batch is not None:
            fields = None if trainer.origins is None else trainer.origins.fields(batch)
            trainer.rollouts.write("rollouts", batch, fields)
            self._metrics = trainer.sample_metrics(batch, use_critic="critic" in trainer.groups)
