"""`commit.json`, the marker over all roles of a checkpoint: written last, read first.

Whatever the file holds, what comes back is of the form that is written, or the error says what is
wrong.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.run_folder.starts import installed_versions
from verl_like.errors import CheckpointError, DamagedCheckpointError
from verl_like.files import (
    file_fault,
    fingerprint,
    read_json_object,
    refuse_other_form,
    write_whole,
)
from workers.training.manifest import MANIFEST, refuse_missing

MARKER = "commit.json"
FORM: dict[str, type] = {"step": int, "config": dict, "inputs": dict, "versions": dict}


def committed(folder: Path) -> list[int]:
    """Steps of the checkpoints in a run folder that were completed, in order."""
    found = (
        re.fullmatch(r"global_step_(\d+)", path.parent.name)
        for path in folder.glob(f"global_step_*/{MARKER}")
    )
    return sorted(int(match[1]) for match in found if match)


def named(steps: list[int]) -> str:
    """The folders of these steps, for a message."""
    return ", ".join(f"global_step_{step}" for step in steps) or "none"


def read_marker(folder: Path) -> dict[str, Any]:
    """What a checkpoint's commit marker says."""
    path = folder / MARKER
    try:
        marker = read_json_object(path)
        refuse_other_form(marker, FORM)
    except FileNotFoundError as error:
        what = (
            "it was never committed (no commit.json)"
            if folder.is_dir()
            else "there is no such folder"
        )
        beside = named(committed(folder.parent))
        raise CheckpointError(
            f"{folder} is no checkpoint: {what}. Committed ones beside it: {beside}."
        ) from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    return marker


def refuse_damaged(folder: Path) -> None:
    """Refuse a checkpoint that lacks a file, or has another in its place.

    Of the shards, which their ranks read, names and sizes are looked at alone.
    """
    for name, written in read_marker(folder)["files"].items():
        if fault := file_fault(folder / name, written):
            raise DamagedCheckpointError(f"{folder / name} {fault}")
    for manifest in sorted(folder.glob(f"*/{MANIFEST}")):
        refuse_missing(manifest.parent)


def write_marker(
    part: Path,
    step: int,
    config: dict[str, Any],
    inputs: dict[str, str],
    known: Mapping[str, Any],
) -> None:
    """Mark what is in `part` as complete: all its files are there.

    The fingerprints of those that are `known` by name were taken when they were written.
    """
    marker = {
        "step": step,
        "files": marked_files(part, known),
        "config": config,
        "inputs": inputs,
        "versions": installed_versions(),
    }
    write_whole(part / MARKER, json.dumps(marker, indent=1))


def marked_files(part: Path, known: Mapping[str, Any]) -> dict[str, Any]:
    """The driver's files and every role's top ones; its manifest vouches for what lies deeper."""
    paths = sorted(part.glob("*")) + sorted(part.glob("*/*"))
    names = [path.relative_to(part).as_posix() for path in paths if path.is_file()]
    return {name: known.get(name) or fingerprint(part / name) for name in names}
