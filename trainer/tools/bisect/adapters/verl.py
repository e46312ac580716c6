"""Read verl 0.9.1: its dump of samples as text, or a record that one line in its trainer writes.

`trainer.rollout_data_dir=DIR` writes `DIR/<step>.jsonl` with the scores of samples as text. For all
other fields, add a line before `self._log_rollout_data(...)` in verl's `ray_trainer.py`:

    record_step("records/verl", self.global_steps, batch, self.config, metrics)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from verl_like.files import json_objects
from verl_like.record import MAX_FILE, Recorder, RecordError

COLUMNS = (
    *("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs"),
    *("ref_log_prob", "values", "token_level_scores", "token_level_rewards", "advantages"),
    "returns",
)


def verl_arrays(folder: Path) -> dict[int, Callable[[], dict[str, np.ndarray]]]:
    """Return step -> a function that reads its prompts and responses as bytes, and its scores."""
    files = {int(path.stem): path for path in folder.glob("*.jsonl") if path.stem.isdecimal()}
    return {step: partial(_rows, path) for step, path in files.items()}


def _rows(path: Path) -> dict[str, np.ndarray]:
    if path.stat().st_size > MAX_FILE:
        raise RecordError(f"{path} has more than {MAX_FILE} bytes.")
    rows, _ = json_objects(path)
    try:
        texts = [[row[key].encode() for row in rows] for key in ("input", "output")]
        scores = np.array([float(row["score"]) for row in rows])
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise RecordError(f"{path} is not a dump of verl's samples: {error!r}.") from error
    arrays = {"scores": scores, "response_lengths": np.array([len(text) for text in texts[1]])}
    for name, column in zip(("prompts", "responses"), texts, strict=True):
        width = max([len(text) for text in column], default=0)
        padded = [list(text) + [0] * (width - len(text)) for text in column]
        arrays[name] = np.array(padded, dtype=np.int64).reshape(len(column), width)
        lengths = np.array([len(text) for text in column])
        if name == "prompts":
            arrays["prompt_mask"] = np.arange(width) < lengths[:, None]
    return arrays


def record_step(
    folder: str, step: int, batch: Any, config: Mapping[str, Any], metrics: Mapping[str, Any]
) -> None:
    """Write a step of verl's trainer from its batch and metrics."""
    if not isinstance(config, dict):
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    arrays = {name: batch.batch[name] for name in COLUMNS if name in batch.batch.keys()}
    width = arrays["responses"].shape[1]
    attended = batch.batch["attention_mask"].bool()
    arrays |= {
        "prompt_mask": attended[:, :-width],
        "response_lengths": attended[:, -width:].sum(1),
        "group": np.unique(batch.non_tensor_batch["uid"].astype(str), return_inverse=True)[1],
    }
    names = ("pg_loss", "kl_loss", "grad_norm", "lr")
    numbers = {n: float(np.mean(metrics[f"actor/{n}"])) for n in names if f"actor/{n}" in metrics}
    Recorder(folder, "verl", config).step(step, arrays, **numbers)
