"""Write, read and check `manifest.json` of a role's folder in a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from verl_like.errors import CheckpointError, DamagedCheckpointError
from verl_like.files import check_form, file_fault, read_json_object, write_atomic

MANIFEST = "manifest.json"
MARKER = "commit.json"
"""The file that a run writes last in a checkpoint or a final model: `trainer.run_folder.folder`."""
ADAPTER = "lora_adapter"
"""The folder for peft in a checkpoint or a final model with LoRA."""
FORMAT = 2
"""Format of `shards/`; format 1 was a custom format."""
NUMBERS = ("step", "num_ranks", "schedule_step", "skipped_steps", "skipped_in_a_row")
FORM: dict[str, type] = {**dict.fromkeys(NUMBERS, int), "format": int, "contents": list}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    files = dict(sorted(manifest["files"].items()))
    text = json.dumps({"format": FORMAT, **manifest, "files": files}, indent=1)
    write_atomic(folder / MANIFEST, text)


def add_files(folder: Path, files: dict[str, Any]) -> None:
    """Add the entries of files that were written later; does nothing without a manifest."""
    if (folder / MANIFEST).is_file():
        manifest = read_manifest(folder)
        write_manifest(folder, manifest | {"files": manifest["files"] | files})


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of the folder."""
    path = folder / MANIFEST
    try:
        manifest = read_json_object(path)
        if "format" not in manifest and "tensors" in manifest:
            raise CheckpointError(
                f"{folder} was written by an earlier verl-like, whose tensor files this version "
                "does not read. Continue with that version (commit.json names it), or export the "
                "model with it and start from the export."
            )
        check_form(manifest, FORM)
    except FileNotFoundError as error:
        problem = "there is no such folder"
        if folder.is_dir():
            problem = "it has no manifest.json, so it was never completed"
        raise DamagedCheckpointError(f"no checkpoint at {folder}: {problem}") from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    return manifest


def loaded_files(manifest: dict[str, Any]) -> list[str]:
    """Return the files that a resume reads, all except exports."""
    return [name for name in manifest["files"] if name.startswith(("shards/", "random/"))]


def reject_missing(folder: Path) -> None:
    """Reject a folder if files that a resume reads are missing or have another size.

    The files are not read.
    """
    manifest = read_manifest(folder)
    for name in loaded_files(manifest):
        if fault := file_fault(folder / name, manifest["files"][name], reads=False):
            raise DamagedCheckpointError(f"{folder / name} {fault}")


def reject_changed(folder: Path, below: str) -> None:
    """Raise if a file whose name begins with `below` differs from its fingerprint."""
    files = read_manifest(folder)["files"]
    names = [name for name in files if name.startswith(below)]
    reject_damaged(folder, {name: file_fault(folder / name, files[name]) for name in names})


def reject_damaged(folder: Path, faults: dict[str, str]) -> None:
    """Raise if any file has a fault; `faults` maps names to descriptions."""
    bad = [f"{name} {fault}" for name, fault in sorted(faults.items()) if fault]
    if bad:
        raise DamagedCheckpointError(f"the checkpoint {folder} is damaged: {'; '.join(bad)}")
