"""Read verl 0.9.1: its dump of samples as text, or a record that one line in its trainer writes.

`trainer.rollout_data_dir=DIR` writes `DIR/<step>.jsonl` with the scores of samples as text. For all
other fields, call `record_verl_step` before `self._log_rollout_data(...)` in verl's
`ray_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from trainer.observers.saved_batches import COLUMNS, NUMBERS, samples_of
from verl_like.files import json_objects
from verl_like.record import Recorder, ragged


def verl_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the prompts and responses of a dump as bytes, and their scores."""
    rows, _ = json_objects(path)
    texts = [[list(row[key].encode()) for row in rows] for key in ("input", "output")]
    arrays = ragged(*texts, scores=[float(row["score"]) for row in rows])
    del arrays["response_mask"]  # of tokens, which the dump does not have
    return arrays


def record_verl_step(
    folder: str, step: int, batch: Any, config: Mapping[str, Any], metrics: Mapping[str, Any]
) -> None:
    """Write a step of verl's trainer from its batch and metrics.

    Example:

        record_verl_step("records/verl", self.global_steps, batch, self.config, metrics)
    """
    if not isinstance(config, dict):
        from omegaconf import OmegaConf

        config = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    columns, uids = batch.batch, batch.non_tensor_batch["uid"]
    arrays = {name: columns[name] for name in COLUMNS if name in columns.keys()}
    arrays |= samples_of(columns["attention_mask"], columns["responses"].shape[1], uids)
    named = {n: metrics[f"actor/{n}"] for n in NUMBERS if f"actor/{n}" in metrics}
    numbers = {name: float(np.mean(values)) for name, values in named.items()}
    Recorder(folder, "verl", config).step(step, arrays, **numbers)
