"""One side of a comparison: a record, or a run folder or dump that is read as one."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer.observers.recorded_steps import RECORD, arrays_of, numbers_of
from trainer.observers.saved_batches import batch_file
from trainer.run_folder.folder import CONFIG_FILE, saved_config
from trainer.tools.bisect.adapters.slime import slime_arrays
from trainer.tools.bisect.adapters.verl import verl_arrays
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.files import json_objects
from verl_like.record import STEPS, VERSION, RecordError, as_array

Arrays = dict[str, np.ndarray]
OURS, ACTOR = "verl-like", "actor_rollout_ref.actor"
DUMPS: dict[str, tuple[str, Callable[[Path], Arrays], int]] = {
    "verl": (".jsonl", verl_arrays, 0),
    "slime": (".pt", slime_arrays, 1),
}
"""Prefix of a side -> how its files `<number>.suffix` are read, and step minus number."""
PREFIXES = ("trl", "tinker", *DUMPS)
MAX_FILE = 4 << 30
"""Bytes of a file that is read."""


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
        values = [self.config[key] for key in keys if key in self.config]
        return next((value for value in values if value is not None), None)

    @property
    def model_path(self) -> str:
        return str(self.setting("actor_rollout_ref.model.path", "model_name_or_path") or "")


def open_side(spec: str) -> Side:
    """Read `DIR`, `trl:DIR`, `verl:DIR`, `tinker:DIR` or `slime:DIR`."""
    kind, colon, rest = spec.partition(":")
    folder = Path(rest if colon and kind in PREFIXES else spec)
    if not folder.exists():
        raise ConfigError(f"{folder} does not exist. Name a run folder, or a record's folder.")
    for candidate in (folder / RECORD, folder):
        if (candidate / STEPS).is_file():
            return recorded_side(spec, candidate)
    if colon and kind in DUMPS:
        suffix, read, offset = DUMPS[kind]
        paths = [path for path in folder.glob(f"*{suffix}") if path.stem.isdecimal()]
        steps = {int(path.stem) + offset: path for path in paths}
        if steps:
            load = partial(read_dump, kind, steps, read)
            return Side(spec, kind, {}, {step: {} for step in steps}, load)
    if (folder / CONFIG_FILE).is_file():
        return side_of_batches(spec, folder)
    raise ConfigError(
        f"{spec} has no record ({STEPS}), no dump that bisect reads, and no {CONFIG_FILE}. Record "
        "a run with trainer.record=all, or write a record as docs/my_curves_differ.md says."
    )


def read_dump(
    kind: str, paths: Mapping[int, Path], read: Callable[[Path], Arrays], step: int
) -> Arrays:
    """Return the arrays of a step of another framework's dump."""
    try:
        return read(check_size(paths[step]))
    except (pickle.UnpicklingError, RuntimeError, EOFError, *DAMAGE) as error:
        raise RecordError(f"{paths[step]} is not a dump of {kind}'s samples: {error!r}") from error


DAMAGE = (LookupError, TypeError, ValueError, AttributeError)


def recorded_side(spec: str, folder: Path) -> Side:
    """Return the side of a record."""
    head, *lines = json_objects(check_size(folder / STEPS))[0] or [{}]
    config, versions = head.get("config", {}), head.get("versions", {})
    if head.get("record") != VERSION or not isinstance(config, dict):
        raise RecordError(f'{folder / STEPS}: its first line must have "record": {VERSION}.')
    for name, version in versions.items() if isinstance(versions, dict) else ():
        config[f"version of {name}"] = version
    steps = {line["step"]: line for line in lines if type(line.get("step")) is int}
    framework = str(head.get("framework", ""))
    return Side(spec, framework, config, steps, lambda step: read_arrays(folder, step))


def check_size(path: Path) -> Path:
    """Return the path of a file that may be read; raise if it is too large."""
    if path.stat().st_size > MAX_FILE:
        raise RecordError(f"{path} has more than {MAX_FILE} bytes.")
    return path


def read_arrays(folder: Path, step: int) -> Arrays:
    """Return the arrays of a recorded step; nothing in the file is executed."""
    path = folder / f"{step}.safetensors"
    if not path.is_file():
        return {}
    try:
        tensors = load_file(check_size(path))
    except (SafetensorError, ValueError) as error:
        raise RecordError(f"{path} is not a safetensors file of a record: {error}.") from error
    return {name: as_array(tensor) for name, tensor in tensors.items()}


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


@dataclass(frozen=True, eq=False)
class Step:
    """The arrays and numbers of one step of one side, in a common form."""

    side: Side
    number: int
    arrays: Arrays
    numbers: Mapping[str, Any]

    @classmethod
    def of(cls, side: Side, number: int) -> Step:
        """Read a step; its `scores` and `response_lengths` are computed if it lacks them."""
        arrays = dict(side.load(number))
        check_shapes(side, number, arrays)
        if "token_level_scores" in arrays:
            arrays["scores"] = arrays["token_level_scores"].sum(-1)
        if "token_level_rewards" in arrays:
            arrays["rewards"] = arrays["token_level_rewards"]
        if "response_lengths" not in arrays and "response_mask" in arrays:
            mask = arrays["response_mask"] != 0
            lengths = mask.shape[1] - np.argmax(mask[:, ::-1], axis=1)
            arrays["response_lengths"] = np.where(mask.any(1), lengths, 0)
        return cls(side, number, arrays, side.steps[number])

    def tensor(self, name: str) -> Tensor | None:
        array = self.arrays.get(name)
        return None if array is None else torch.from_numpy(np.array(array, dtype=np.float32))

    def log_probs(self, *names: str) -> Tensor | None:
        """Return the first of these log-probs that is recorded, or the sampler's."""
        known = (self.tensor(name) for name in (*names, "rollout_log_probs"))
        return next((tensor for tensor in known if tensor is not None), None)

    @property
    def mask(self) -> Tensor | None:
        mask = self.tensor("response_mask")
        return None if mask is None else mask.bool()

    @property
    def num_updates(self) -> int:
        """The number of optimizer steps; 1 if it is unknown."""
        if (mini := self.arrays.get("mini_batch")) is not None:
            return len(np.unique(mini))
        config, rows = self.side.config, len(self.arrays.get("responses", ()))
        per_update = config.get(f"{ACTOR}.ppo_mini_batch_size") or rows
        per_update *= config.get("actor_rollout_ref.rollout.n") or 1
        return int(max(rows // max(per_update, 1), 1) * config.get(f"{ACTOR}.ppo_epochs", 1))

    def ids(self, name: str) -> list[np.ndarray]:
        """Return the tokens of each row's prompt or response, without padding; [] if unknown."""
        tokens = self.arrays.get(name, np.zeros((0, 0)))
        mask = np.arange(tokens.shape[1]) < self.lengths(tokens)[:, None]
        if name == "prompts":
            mask = self.arrays.get("prompt_mask", np.ones_like(tokens)) != 0
        return [row[inside] for row, inside in zip(tokens, mask, strict=True)]

    def lengths(self, tokens: np.ndarray) -> np.ndarray:
        """Return the length of each response; the whole width if it is unknown."""
        return self.arrays.get("response_lengths", np.full(len(tokens), tokens.shape[-1]))

    def on_tokens(self, array: np.ndarray, width: int) -> np.ndarray:
        """Return [rows, width], zero after each response; [rows] is copied to the tokens."""
        wide = np.zeros((len(array), width))
        wide[:, : array.shape[-1] if array.ndim == 2 else width] = array.reshape(len(array), -1)
        return np.where(np.arange(width) < self.lengths(wide)[:, None], wide, 0.0)

    def in_order(self, order: np.ndarray) -> Step:
        arrays = {name: array[order] for name, array in self.arrays.items()}
        return Step(self.side, self.number, arrays, self.numbers)


def check_shapes(side: Side, number: int, arrays: Arrays) -> None:
    """Reject arrays whose numbers of rows or tokens do not fit each other."""
    of_tokens = [x for n, x in arrays.items() if x.ndim == 2 and not n.startswith("prompt")]
    wanted = (*of_tokens, *arrays.values())[0].shape if arrays else ()
    for name, array in arrays.items():
        dims = 1 if name.startswith("prompt") else 2
        if array.ndim not in (1, 2) or array.shape[:dims] != wanted[: min(array.ndim, dims)]:
            raise ConfigError(
                f"{side.name}, step {number}: {name} has shape {array.shape}, but other arrays "
                f"have the shape {wanted} (rows, tokens). All arrays of a step have the same rows."
            )
