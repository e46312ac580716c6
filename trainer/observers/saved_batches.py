"""Observers of a step's batches: save them, check the sampled tokens, and write samples as text.

`batches/` in the run folder has the batch of a step as each stage gets it:

    <run folder>/batches/<step>/score.safetensors, estimate.safetensors, update.safetensors

These files are written if `trainer.batch_steps_to_keep` is set; `verl-like replay` uses them to run
a stage again without generation. `rollouts/` has the samples of a step as text, with scores and
other numbers.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from verl_like.batch.protocol import DataProto
from workers.rollout.sample import check_sample_hashes

BATCHES_FOLDER = "batches"
STAGES = "score", "estimate", "update"
"""The stages that take a batch, in order."""


def batch_file(run_folder: Path, step: int, stage: str) -> Path:
    """Return the file of a stage's input batch."""
    return run_folder / BATCHES_FOLDER / str(step) / f"{stage}.safetensors"


class SavedBatches:
    """Saves the batches of the newest steps, as many as `trainer.batch_steps_to_keep`."""

    def __init__(self, config: Any) -> None:
        self._run_folder = Path(config.trainer.default_local_dir)
        self._num_steps = config.trainer.batch_steps_to_keep

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Save the input batch of the stage."""
        if stage in STAGES and batch is not None:
            self.save(stage, batch, trainer.global_step)

    def save(self, stage: str, batch: DataProto, step: int) -> None:
        """Write the stage's file; with a step's first file, delete the files of an old step."""
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
        """Add the number of verified samples to the metrics."""
        metrics |= self._metrics
        self._metrics = {}


class WrittenSamples:
    """Writes the samples of every step."""

    def __init__(self) -> None:
        self._waiting: DataProto | None = None
        """The samples of the step, until they are written."""
        self._metrics: dict[str, float] = {}

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Remember the samples with their rewards and advantages."""
        if stage == "update":
            self._waiting = batch

    def on_update(self, trainer: Any, batch: DataProto) -> None:
        """Write the samples while the workers compute."""
        self._write(trainer)

    def on_stage_end(self, trainer: Any, stage: str, result: Any) -> None:
        """Write the samples now if a user's update did not call `on_update`."""
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
            metrics_of = trainer.recipe.sample_metrics
            self._metrics = metrics_of(batch, use_critic="critic" in trainer.groups)
