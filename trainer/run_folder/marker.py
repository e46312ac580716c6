"""The committed checkpoints of a run folder: their marker `commit.json`, and their removal.

The marker covers all roles; it is written last and read first. Reading it returns data of the
expected form, or raises an error that says what is wrong.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.run_folder.folder import installed_versions
from verl_like.errors import CheckpointError, DamagedCheckpointError
from verl_like.files import (
    check_form,
    file_fault,
    fingerprint,
    json_objects,
    read_json_object,
    write_whole,
)
from workers.training.manifest import MANIFEST, reject_missing

MARKER = "commit.json"
MODEL = "model"
"""Folder of the final trained model, in the run folder."""
STEP_FOLDER = r"global_step_(\d+)"
FORM: dict[str, type] = {"step": int, "config": dict, "inputs": dict, "versions": dict}


def committed(folder: Path) -> list[int]:
    """Return the steps of the completed checkpoints in a run folder, in order."""
    matches = (
        re.fullmatch(STEP_FOLDER, path.parent.name)
        for path in folder.glob(f"global_step_*/{MARKER}")
    )
    return sorted(int(match[1]) for match in matches if match)


def named(steps: list[int]) -> str:
    """Return the folder names of these steps, for a message."""
    return ", ".join(f"global_step_{step}" for step in steps) or "none"


def read_marker(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's commit marker."""
    path = folder / MARKER
    try:
        marker = read_json_object(path)
        check_form(marker, FORM)
        of_name = re.fullmatch(STEP_FOLDER, folder.name)
        if of_name and int(of_name[1]) != marker["step"]:
            raise ValueError(f"step is {marker['step']!r:.40} in {folder.name}")
    except FileNotFoundError as error:
        problem = (
            "it was never committed (no commit.json)"
            if folder.is_dir()
            else "there is no such folder"
        )
        beside = named(committed(folder.parent))
        raise CheckpointError(
            f"{folder} is no checkpoint: {problem}. Committed ones next to it: {beside}."
        ) from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    return marker


def marker_of_model(run: Path) -> dict[str, Any] | None:
    """Return the marker of a run's final model, or None if a checkpoint is newer."""
    if not (run / MODEL / MARKER).is_file():
        return None
    marker = read_marker(run / MODEL)
    return marker if marker["step"] >= max(committed(run), default=0) else None


def reject_damaged(folder: Path) -> None:
    """Raise if a file of a checkpoint is missing or changed.

    The shards, which their ranks read, are checked only by name and size.
    """
    for name, written in read_marker(folder)["files"].items():
        if fault := file_fault(folder / name, written):
            raise DamagedCheckpointError(f"{folder / name} {fault}")
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        reject_missing(manifest.parent)


def write_marker(part: Path, step: int, config: dict[str, Any], inputs: dict[str, str]) -> None:
    """Mark the files in `part` as complete.

    The marker covers the driver's files and every role's top-level files. A role's manifest covers
    its deeper files.
    """
    paths = [path for path in sorted(part.glob("*")) + sorted(part.glob("*/*")) if path.is_file()]
    marker = {
        "step": step,
        "files": {path.relative_to(part).as_posix(): fingerprint(path) for path in paths},
        "config": config,
        "inputs": inputs,
        "versions": installed_versions(),
    }
    write_whole(part / MARKER, json.dumps(marker, indent=1))


def drop_old(folder: Path, keep: int | None) -> None:
    """Delete checkpoints of the run folder that are neither among the newest nor the best."""
    for step in steps_to_drop(folder, committed(folder), keep):
        checkpoint = folder / f"global_step_{step}"
        old = checkpoint.with_name(checkpoint.name + ".old")
        checkpoint.replace(old)  # a half-deleted folder must never have a checkpoint's name
        shutil.rmtree(old, ignore_errors=True)


def steps_to_drop(folder: Path, steps: Sequence[int], keep: int | None) -> list[int]:
    """Return the steps of the checkpoints to delete, oldest first.

    The newest `keep` stay, and so does the best by validation, or the later of equals.
    """
    if keep is None:
        return []
    # a long run has many other lines, which are not parsed
    lines, _ = json_objects(folder / "metrics.jsonl", '"val')
    scored = [(validation_score(line), line["step"]) for line in lines if line.get("step") in steps]
    best = max(((score, step) for score, step in scored if score is not None), default=(0, None))[1]
    return [step for step in steps[:-keep] if step != best]


def validation_score(line: Mapping[str, Any]) -> float | None:
    """Return one number for the validation in a line of metrics; larger is better.

    It is the mean of `val-core/...`, or minus the mean loss if a recipe validates only by losses.
    """
    numbers = {name: x for name, x in line.items() if isinstance(x, int | float)}
    losses = [x for name, x in numbers.items() if name.startswith("val") and name.endswith("loss")]
    scored = [name for name in numbers if name.startswith("val-core/")]
    scores = [numbers[name] for name in scored if not name.endswith("loss")]
    if not scores and not losses:
        return None
    mean = sum(scores) / len(scores) if scores else -sum(losses) / len(losses)
    return mean if math.isfinite(mean) else -math.inf
