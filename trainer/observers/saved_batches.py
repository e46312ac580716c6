"""Observers of a step's batches: save batches, check the sampled tokens, and write samples.

`batches/` of a run folder has the batch of a step, as the input of each stage:

    <run folder>/batches/<step>/score.safetensors, estimate.safetensors, update.safetensors

They are written if `trainer.max_batches_to_keep` is set, to run a stage again without generation
(`verl-like replay`). `rollouts/` has the samples of a step as text, and their numbers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from verl_like.batch.protocol import DataProto
from workers.rollout.batches import check_sample_hashes

BATCHES_FOLDER = "batches"
STAGES = ("score", "estimate", "update")
"""The stages that take a batch, in their order."""
FILES = {"score": "score", "adv": "estimate", "update": "update"}
"""Stage, as the clock names it -> the name of its file."""


def batch_file(run_folder: Path, step: int, stage: str) -> Path:
    """Return the file of a stage's input batch."""
    return run_folder / BATCHES_FOLDER / str(step) / f"{stage}.safetensors"


class SavedBatches:
    """Saves the batches of a run's newest steps, as many as configured."""

    def __init__(self, config: Any) -> None:
        self._run_folder = Path(config.trainer.default_local_dir)
        self._num_steps = config.trainer.max_batches_to_keep

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Save the input of the stage."""
        if stage in FILES and batch is not None:
            self.save(FILES[stage], batch, trainer.global_step)

    def save(self, stage: str, batch: DataProto, step: int) -> None:
        """Write the stage's file; the step's first batch also deletes an old step's files."""
        if not self._num_steps:
            return
        path = batch_file(self._run_folder, step, stage)
        if stage == STAGES[0]:
            too_old = batch_file(self._run_folder, step - self._num_steps, stage).parent
            shutil.rmtree(too_old, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        batch.save_to_disk(path)


class DrawCheck:
    """Raises `BatchError` if a stage or hook has changed sampled tokens."""

    def __init__(self) -> None:
        self._metrics: dict[str, float] = {}

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Check the input of the update."""
        if stage == "update" and batch is not None:
            self._metrics = check_sample_hashes(batch)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Report how many samples were verified."""
        metrics |= self._metrics
        self._metrics = {}


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
