"""`batches/` of a run folder: the batch of a step, as the input of each stage.

    <run folder>/batches/<step>/score.safetensors, estimate.safetensors, update.safetensors

They are written if `trainer.max_batches_to_keep` is set, to run a stage again without generation
(`verl-like replay`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from verl_like.batch.protocol import DataProto

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
