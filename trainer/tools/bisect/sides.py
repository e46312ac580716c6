"""One side of a comparison: a record, or a run folder or dump that is read as one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.observers.recorded_steps import RECORD, arrays_of, numbers_of
from trainer.observers.saved_batches import batch_file
from trainer.run_folder.folder import CONFIG_FILE, saved_config
from trainer.tools.bisect.adapters.slime import slime_arrays
from trainer.tools.bisect.adapters.verl import verl_arrays
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.files import json_objects
from verl_like.record import STEPS, RecordError, read_arrays, read_steps

Arrays = dict[str, np.ndarray]
OURS = "verl-like"


@dataclass(frozen=True)
class Side:
    """Settings and steps of a run."""

    name: str
    framework: str
    config: dict[str, Any]
    versions: dict[str, str]
    steps: dict[int, dict[str, Any]]
    """Step -> its numbers."""
    load: Callable[[int], Arrays]
    """Returns the arrays of a step."""

    def setting(self, *keys: str) -> Any:
        """Return the value of the first of these keys that the run knows."""
        return next((self.config[key] for key in keys if key in self.config), None)

    @property
    def model_path(self) -> str:
        return str(self.setting("actor_rollout_ref.model.path", "model_name_or_path") or "")


def open_side(spec: str) -> Side:
    """Read `DIR`, `trl:DIR`, `verl:DIR`, `tinker:DIR` or `slime:DIR`."""
    kind, colon, rest = spec.partition(":")
    folder = Path(rest if colon and kind in DUMPS else spec)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist. Name a run folder, or a record's folder.")
    for candidate in (folder / RECORD, folder):
        if (candidate / STEPS).is_file():
            return recorded_side(spec, candidate)
    dump = DUMPS.get(kind) if colon else None
    if dump is not None:
        steps = dump(folder)
        if steps:
            numbers = {step: dict[str, Any]() for step in steps}
            return Side(spec, kind, {}, {}, numbers, lambda step: steps[step]())
    if (folder / CONFIG_FILE).is_file():
        return side_of_batches(spec, folder)
    raise ConfigError(
        f"{spec} has no record ({STEPS}), no dump that bisect reads, and no {CONFIG_FILE}. Record "
        "a run with trainer.record=all, or write a record as docs/my_curves_differ.md says."
    )


DUMPS: dict[str, Any] = {"trl": None, "tinker": None, "verl": verl_arrays, "slime": slime_arrays}
"""Prefix of a side -> a function that reads a dump which is not a record."""


def recorded_side(spec: str, folder: Path) -> Side:
    """Return the side of a record."""
    head, steps = read_steps(folder)
    config, versions = head.get("config", {}), head.get("versions", {})
    if not isinstance(config, dict) or not isinstance(versions, dict):
        raise RecordError(f"{folder / STEPS}: config and versions must be objects.")

    def load(step: int) -> Arrays:
        path = folder / f"{step}.safetensors"
        return read_arrays(path) if path.is_file() else {}

    return Side(spec, str(head.get("framework", "")), config, versions, steps, load)


def side_of_batches(spec: str, folder: Path) -> Side:
    """Return the side of a run folder without a record: its metrics and saved batches."""
    config = saved_config(folder)
    entries, _ = json_objects(folder / "metrics.jsonl")
    lines = {line["step"]: line for line in entries if type(line.get("step")) is int}
    steps = {step: numbers_of(line, config) for step, line in lines.items() if step > 0}

    def load(step: int) -> Arrays:
        path = batch_file(folder, step, "update")
        return arrays_of(DataProto.load_from_disk(path)) if path.is_file() else {}

    return Side(spec, OURS, dict(config), {}, steps, load)
