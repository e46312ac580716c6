"""What a finished run gives back: its numbers, and where its files are."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from trainer.config.flat import config_hash
from trainer.config.schema import RunConfig
from trainer.run_folder.marker import MODEL, committed, marker_of_model
from verl_like.files import json_objects

logger = logging.getLogger(__name__)
EXPORT = "huggingface"
"""Folder of a role's checkpoint that `from_pretrained` loads."""


@dataclass(frozen=True)
class RunResult:
    """A run, after its last step."""

    folder: Path
    """The run folder."""
    config_hash: str
    """The first line of the folder's `config.yaml`; equal for equal configurations."""
    metrics: list[dict[str, float]]
    """The lines of `metrics.jsonl`: a step's numbers, with its number as `step`."""
    model_folder: Path | None
    """The trained model for `from_pretrained`, else the newest export; None if there is none."""

    @classmethod
    def of(cls, config: RunConfig, role: str) -> RunResult:
        """Read from the run folder; the export is that of `role`."""
        folder = Path(config.trainer.default_local_dir)
        metrics = _read_metrics(folder / "metrics.jsonl")
        exports = [folder / f"global_step_{step}" / role / EXPORT for step in committed(folder)]
        left = [folder / MODEL] if marker_of_model(folder) else []
        places = [*left, *reversed(exports)]
        model_folder = next((path for path in places if path.is_dir()), None)
        return cls(folder, config_hash(config), metrics, model_folder)


def _read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of steps; what is half a line, or another's, is left out with a warning."""
    objects, num_broken = json_objects(path)
    found = [row for row in objects if "step" in row]
    num_lines = len(objects) + num_broken
    if len(found) < num_lines:
        logger.warning(
            "%s: %d of %d lines are no step's, and left out.",
            path, num_lines - len(found), num_lines,
        )  # fmt: skip
    return found
