"""Read what slime's `--save-debug-rollout-data DIR/{rollout_id}.pt` wrote, without pickle."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl_like.record import MAX_FILE, RecordError

FIELDS = {"rollout_log_probs": "rollout_log_probs", "response_mask": "loss_mask"}
"""Field of a record -> key of slime's sample, with a number per response token."""


def slime_arrays(folder: Path) -> dict[int, Callable[[], dict[str, np.ndarray]]]:
    """Return step -> a function that reads its samples; step 1 is rollout 0."""
    files = {int(path.stem): path for path in folder.glob("*.pt") if path.stem.isdecimal()}
    return {number + 1: partial(_rows, path) for number, path in files.items()}


def _rows(path: Path) -> dict[str, np.ndarray]:
    import torch

    if path.stat().st_size > MAX_FILE:
        raise RecordError(f"{path} has more than {MAX_FILE} bytes.")
    try:
        samples = torch.load(path, map_location="cpu", weights_only=True)["samples"]
        return arrays_of_samples(samples)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise RecordError(f"{path} holds more than tensors and plain values: {error}.") from error
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise RecordError(f"{path} is not a dump of slime's samples: {error!r}.") from error


def arrays_of_samples(samples: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the arrays of a record from slime's samples as dicts."""
    lengths = [int(sample["response_length"]) for sample in samples]
    tokens = [np.asarray(sample["tokens"], dtype=np.int64) for sample in samples]
    prompts = [row[: len(row) - n] for row, n in zip(tokens, lengths, strict=True)]
    arrays = {
        "prompts": padded(prompts),
        "prompt_mask": padded([np.ones(len(row)) for row in prompts]) != 0,
        "responses": padded([row[len(row) - n :] for row, n in zip(tokens, lengths, strict=True)]),
        "response_lengths": np.array(lengths),
        "truncated": np.array([sample.get("status") == "truncated" for sample in samples]),
    }
    if all(isinstance(sample.get("reward"), int | float) for sample in samples):
        arrays["scores"] = np.array([float(sample["reward"]) for sample in samples])
    if all(sample.get("group_index") is not None for sample in samples):
        arrays["group"] = np.array([int(sample["group_index"]) for sample in samples])
    for name, key in FIELDS.items():
        if all(sample.get(key) is not None for sample in samples):
            arrays[name] = padded([np.asarray(sample[key], dtype=np.float32) for sample in samples])
    if "response_mask" not in arrays:
        arrays["response_mask"] = padded([np.ones(n) for n in lengths])
    return arrays


def padded(rows: list[np.ndarray]) -> np.ndarray:
    """Return rows of different lengths as one array, with zeros behind each."""
    result = np.zeros((len(rows), max(map(len, rows), default=0)), dtype=rows[0].dtype)
    for number, row in enumerate(rows):
        result[number, : len(row)] = row
    return result
