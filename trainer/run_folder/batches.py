"""`batches/` of a run folder: the batch of a step, as it goes into each stage.

    <run folder>/batches/<step>/score.safetensors, estimate.safetensors, update.safetensors

They are written where `trainer.max_batches_to_keep` says so, to make a stage again without a
generation (`verl-like replay`).
"""

from __future__ import annotations

import shutil
from pathlib import Path

from verl_like.batch.protocol import DataProto

BATCHES_FOLDER = "batches"
STAGES = ("score", "estimate", "update")
"""The stages that get a batch, in their order."""


def batch_file(run_folder: Path, step: int, stage: str) -> Path:
    """The file of the batch that went into a stage."""
    return run_folder / BATCHES_FOLDER / str(step) / f"{stage}.safetensors"


class SavedBatches:
    """The saved batches of a run's newest steps, as many as are asked for."""

    def __init__(self, run_folder: Path, num_steps: int) -> None:
        """With `num_steps` 0, no batch is saved."""
        self._run_folder, self._num_steps = run_folder, num_steps

    def save(self, stage: str, batch: DataProto, step: int) -> None:
        """Write what goes into the stage; with the step's first batch, an old step's go."""
        if not self._num_steps:
            return
        path = batch_file(self._run_folder, step, stage)
        if stage == STAGES[0]:
            too_old = batch_file(self._run_folder, step - self._num_steps, stage).parent
            shutil.rmtree(too_old, ignore_errors=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        batch.save_to_disk(path)
