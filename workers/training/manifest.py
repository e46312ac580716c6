"""`manifest.json` of a role's part of a checkpoint: read, checked, and compared with the files.

Whatever the file holds, what comes back is of the form that `workers.training.checkpoint` writes,
or the error says what is wrong with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl_like.errors import DamagedCheckpointError
from verl_like.files import file_fault, read_json_object, refuse_other_facts

MANIFEST = "manifest.json"
NUMBERS = ("step", "num_ranks", "schedule_step", "skipped_steps")
NEWER_NUMBERS = ("skipped_in_a_row",)
"""Numbers that checkpoints of earlier versions do not have."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The folder's manifest: what it holds."""
    path = folder / MANIFEST
    try:
        manifest = read_json_object(path)
        _refuse_other_form(manifest)
    except FileNotFoundError as error:
        what = "there is no such folder"
        if folder.is_dir():
            what = "it has no manifest.json, so it was never completed"
        raise DamagedCheckpointError(f"no checkpoint at {folder}: {what}") from error
    except (OSError, ValueError) as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error
    return manifest


def _refuse_other_form(manifest: dict[str, Any]) -> None:
    """A ValueError where it is not what `workers.training.checkpoint` writes."""
    for name in (*NUMBERS, *(newer for newer in NEWER_NUMBERS if newer in manifest)):
        if type(manifest.get(name)) is not int:
            raise ValueError(f"{name} is {manifest.get(name)!r:.40}, not a number")
    contents = manifest.get("contents")
    if not isinstance(contents, list) or not all(isinstance(name, str) for name in contents):
        raise ValueError(f"contents is {contents!r:.40}, not a list of names")
    refuse_other_facts(manifest.get("files"))

    tensors = manifest.get("tensors")
    if not isinstance(tensors, dict):
        raise ValueError(f"tensors is {tensors!r:.40}, not an object of tensors by name")
    for name, facts in tensors.items():
        shape = facts.get("shape") if isinstance(facts, dict) else None
        if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"tensor {name!r:.80} has no shape, but {facts!r:.40}")
        dtype_of(facts.get("dtype"))


def dtype_of(name: Any) -> torch.dtype:
    """The type that a manifest calls `torch.float32`, say."""
    found = getattr(torch, str(name).removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r:.40} is no type of tensors")
    return found


def loaded_files(manifest: dict[str, Any]) -> list[str]:
    """What a resume reads: exports may be taken away."""
    return [name for name in manifest["files"] if name.startswith(("shards/", "random/"))]


def refuse_missing(folder: Path) -> None:
    """Refuse a part whose files are not there, or have another size; nothing of them is read."""
    manifest = read_manifest(folder)
    for name in loaded_files(manifest):
        if fault := file_fault(folder / name, manifest["files"][name], reads=False):
            raise DamagedCheckpointError(f"{folder / name} {fault}")


def refuse_damaged(folder: Path, faults: dict[str, str]) -> None:
    """Refuse a part of which files have faults, by name."""
    bad = [f"{name} {fault}" for name, fault in sorted(faults.items()) if fault]
    if bad:
        raise DamagedCheckpointError(f"the checkpoint {folder} is damaged: {'; '.join(bad)}")
