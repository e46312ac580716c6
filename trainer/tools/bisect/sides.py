"""One side of a comparison: a record, or a run folder or dump that is read as one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml  # type: ignore[import-untyped]
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.observers.saved_batches import RECORD, arrays_of, batch_file, numbers_of
from trainer.run_folder.folder import CONFIG_FILE, saved_config
from trainer.tools.bisect.adapters import slime_arrays, verl_arrays
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.files import json_objects
from verl_like.record import STEPS, VERSION, RecordError, as_array, padded

STAGES = yaml.safe_load(Path(__file__).with_name("stages.yaml").read_text(encoding="utf-8"))
FIELDS = {name for stage in STAGES for name in stage["fields"]}
Arrays = dict[str, np.ndarray]
OURS, ACTOR = "verl-like", "actor_rollout_ref.actor"
DUMPS: dict[str, tuple[str, Callable[[Path], Arrays], int]] = {
    "verl": (".jsonl", verl_arrays, 0),
    "slime": (".pt", slime_arrays, 1),
}
"""Prefix of a side -> how its files `<number>.suffix` are read, and step minus number."""
PREFIXES = ("trl", "tinker", *DUMPS)
IDS = ("prompts", "responses")
MAX_FILE = 4 << 30
"""Bytes of a file that is read."""
DAMAGE = (
    *(pickle.UnpicklingError, RuntimeError, EOFError, SafetensorError),
    *(LookupError, TypeError, ValueError, AttributeError),
)


@dataclass(frozen=True)
class Side:
    """Settings and steps of a run."""

    name: str
    framework: str
    config: Mapping[str, Any]
    steps: Mapping[int, Mapping[str, Any]]
    """Step -> its numbers."""
    load: Callable[[int], Arrays]
    """Returns the arrays of a step."""

    def setting(self, *keys: str) -> Any:
        """Return the value of the first of these keys that the run sets."""
        values = [self.config.get(key) for key in keys]
        return next((value for value in values if value is not None), None)

    @property
    def model_path(self) -> str:
        return str(self.setting("actor_rollout_ref.model.path", "model_name_or_path") or "")


def open_side(spec: str) -> Side:
    """Read `DIR`, `trl:DIR`, `verl:DIR`, `tinker:DIR` or `slime:DIR`."""
    kind, _, rest = spec.partition(":")
    folder = Path(rest if kind in PREFIXES and rest else spec)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist. Name a run folder, or a record's folder.")
    for candidate in (folder / RECORD, folder):
        if (candidate / STEPS).is_file():
            return recorded_side(spec, candidate)
    if kind in DUMPS:
        suffix, read, offset = DUMPS[kind]
        paths = {int(path.stem) + offset: path for path in folder.glob(f"[0-9]*{suffix}")}
        if paths:
            load = lambda step: read_file(paths[step], read)  # noqa: E731
            return Side(spec, kind, {}, {step: {} for step in paths}, load)
    if (folder / CONFIG_FILE).is_file():
        return side_of_batches(spec, folder)
    raise ConfigError(
        f"{spec} has no record ({STEPS}), no dump that bisect reads, and no {CONFIG_FILE}. Record "
        "a run with trainer.record=all, or write a record as docs/my_curves_differ.md says."
    )


def recorded_side(spec: str, folder: Path) -> Side:
    """Return the side of a record."""
    head, *lines = json_objects(check_size(folder / STEPS))[0] or [{}]
    config, versions = head.get("config", {}), head.get("versions", {})
    if head.get("record") != VERSION or not isinstance(config, dict):
        raise RecordError(f'{folder / STEPS}: its first line must have "record": {VERSION}.')
    if isinstance(versions, dict):
        config |= {f"version of {name}": version for name, version in versions.items()}
    steps = {line["step"]: line for line in lines if type(line.get("step")) is int}
    framework = str(head.get("framework", ""))
    return Side(spec, framework, config, steps, lambda step: read_arrays(folder, step))


def side_of_batches(spec: str, folder: Path) -> Side:
    """Return the side of a run folder without a record: its metrics and saved batches."""
    config = saved_config(folder)
    entries, _ = json_objects(folder / "metrics.jsonl")
    lines = {line["step"]: line for line in entries if type(line.get("step")) is int}
    steps = {step: numbers_of(line, config) for step, line in lines.items() if step > 0}

    def load(step: int) -> Arrays:
        path = batch_file(folder, step, "update")
        return arrays_of(DataProto.load_from_disk(path)) if path.is_file() else {}

    return Side(spec, OURS, dict(config), steps, load)


def check_size(path: Path) -> Path:
    """Return the path of a file that may be read; raise if it is too large."""
    if path.stat().st_size > MAX_FILE:
        raise RecordError(f"{path} has more than {MAX_FILE} bytes.")
    return path


def read_file(path: Path, read: Callable[[Path], Mapping[str, Any]]) -> Arrays:
    """Return the arrays in a file; nothing in it is executed."""
    try:
        return {name: as_array(array) for name, array in read(check_size(path)).items()}
    except DAMAGE as error:
        raise RecordError(f"{path} has no samples that bisect can read: {error!r}") from error


def read_arrays(folder: Path, step: int) -> Arrays:
    """Return the arrays of a recorded step; a step may have none."""
    path = folder / f"{step}.safetensors"
    return read_file(path, load_file) if path.is_file() else {}


@dataclass(frozen=True, eq=False)
class Step:
    """The fields of one step of one side, in a common form.

    Ids are [rows, tokens] and end with -1. Numbers of tokens are [rows, tokens], and zero after
    each response. Numbers of the whole step are [names].
    """

    side: Side
    number: int
    arrays: Arrays
    lengths: np.ndarray
    """[rows]: the number of tokens of each response."""
    names: Mapping[str, list[str]] = field(default_factory=dict)
    """Field of the whole step -> the names of its numbers."""

    @classmethod
    def of(cls, side: Side, number: int) -> Step:
        """Read a step; compute its scores and lengths if it lacks them."""
        arrays, names = dict(side.load(number)), {}
        width, lengths = check_shapes(side, number, arrays)
        inside = np.arange(width) < lengths[:, None]
        if "token_level_scores" in arrays:
            arrays["scores"] = arrays["token_level_scores"].sum(-1)
        if "token_level_rewards" in arrays:
            arrays["rewards"] = arrays["token_level_rewards"]
        prompts = arrays.get("prompts", np.zeros((0, 0)))
        of_prompts = arrays.pop("prompt_mask", np.ones_like(prompts)) != 0
        for name, array in arrays.items():
            if name == "prompts":
                rows = [row[mask] for row, mask in zip(array, of_prompts, strict=True)]
                arrays[name] = padded(rows, fill=-1)
            elif name in ("advantages", "returns") and array.ndim == 1:
                arrays[name] = np.where(inside, array[:, None], 0)
            elif array.ndim == 2:
                arrays[name] = np.where(inside, array, -1 if name in IDS else 0)
        for name in FIELDS & side.steps[number].keys():
            value = side.steps[number][name]
            numbers = value if isinstance(value, dict) else {"": value}
            if any(not isinstance(x, int | float) for x in numbers.values()):
                raise ConfigError(f"{side.name}, step {number}: {name}={value!r} is no number.")
            arrays[name], names[name] = np.array([*numbers.values()], dtype=float), [*numbers]
        return cls(side, number, arrays, lengths, names)

    def tensor(self, *names: str, default: Tensor | None = None) -> Tensor:
        """Return the first of these fields that is recorded; raise LookupError if none is."""
        for name in names:
            if name in self.arrays:
                return torch.from_numpy(self.arrays[name].astype(np.float32))
        if default is None:
            raise LookupError(f"{self.side.name}: step {self.number} has no {' or '.join(names)}")
        return default

    @property
    def mask(self) -> Tensor:
        return self.tensor("response_mask").bool()

    @property
    def num_updates(self) -> int:
        """The number of optimizer steps; 1 if it is unknown."""
        mini = self.arrays.get("mini_batch")
        if mini is not None:
            return len(np.unique(mini))
        rows, config = len(self.lengths), self.side.config
        per_update = config.get(f"{ACTOR}.ppo_mini_batch_size") or rows
        per_update *= config.get("actor_rollout_ref.rollout.n") or 1
        return int(max(rows // max(per_update, 1), 1) * config.get(f"{ACTOR}.ppo_epochs", 1))

    def ids(self, name: str) -> list[np.ndarray]:
        """Return the tokens of each row's prompt or response; [] if unknown."""
        return [row[row >= 0] for row in self.arrays.get(name, ())]

    def in_order(self, order: np.ndarray) -> Step:
        """Return the step with its rows in another order."""
        arrays = {n: x if n in self.names else x[order] for n, x in self.arrays.items()}
        return Step(self.side, self.number, arrays, self.lengths[order], self.names)


def check_shapes(side: Side, number: int, arrays: Arrays) -> tuple[int, np.ndarray]:
    """Return the width and the lengths of responses; reject arrays of different sizes."""
    of_tokens = [x for n, x in arrays.items() if x.ndim == 2 and not n.startswith("prompt")]
    shape = (*of_tokens, *arrays.values(), np.zeros(0))[0].shape
    for name, array in arrays.items():
        dims = 1 if name.startswith("prompt") else 2
        if array.ndim not in (1, 2) or array.shape[:dims] != shape[: min(array.ndim, dims)]:
            raise ConfigError(
                f"{side.name}, step {number}: {name} has shape {array.shape}, but other arrays "
                f"have the shape {shape} (rows, tokens). All arrays of a step have the same rows."
            )
    width = of_tokens[0].shape[1] if of_tokens else 1
    mask = arrays.get("response_mask", np.ones((shape[0], width))) != 0
    last = np.where(mask.any(1), mask.shape[1] - np.argmax(mask[:, ::-1], axis=1), 0)
    return width, arrays.get("response_lengths", last)
