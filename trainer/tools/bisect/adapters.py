"""Records of other frameworks, which `verl-like bisect` compares: slime, Tinker and verl 0.9.1.

- slime: what its `--save-debug-rollout-data DIR/{rollout_id}.pt` wrote, read without pickle.
- Tinker: the loop of a client, from the data that it sends to `forward_backward`. `data` is a list
  of `tinker.Datum`, as tinker_cookbook's `assemble_training_data` returns it.
- verl: `trainer.rollout_data_dir=DIR` writes `DIR/<step>.jsonl` with the scores of samples as text.
  For all other fields, call `record_verl_step` before `self._log_rollout_data(...)` in verl's
  `ray_trainer.py`.

`trainer.tools.bisect.trl_callback` records TRL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.observers.saved_batches import COLUMNS, NUMBERS, samples_of
from verl_like.files import json_objects
from verl_like.record import Recorder, ragged


def slime_arrays(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a rollout; only tensors, numbers and other plain values are read."""
    import torch

    with torch.serialization.safe_globals(PICKLED_NUMBER_PARTS):
        samples = torch.load(path, map_location="cpu", weights_only=True)["samples"]

    def column(key: str, kinds: Any = object) -> list[Any] | None:
        values = [sample.get(key) for sample in samples]
        return values if all(x is not None and isinstance(x, kinds) for x in values) else None

    tokens, lengths = column("tokens") or [], column("response_length", int) or []
    begins = [len(row) - n for row, n in zip(tokens, lengths, strict=True)]
    return ragged(
        [row[:n] for row, n in zip(tokens, begins, strict=True)],
        [row[n:] for row, n in zip(tokens, begins, strict=True)],
        scores=column("reward", SLIME_NUMBERS),
        group=column("group_index", SLIME_NUMBERS),
        truncated=[sample.get("status") == "truncated" for sample in samples],
        response_mask=column("loss_mask"),
        rollout_log_probs=column("rollout_log_probs"),
    )


SLIME_NUMBERS = (int, float, np.number)
PICKLED_NUMBER_PARTS: list[Any] = [np.dtype, np.float64(0).__reduce__()[0]]
PICKLED_NUMBER_PARTS += [type(np.dtype(kind)) for kind in (np.float64, np.float32, np.int64)]
"""The parts of a pickled number of numpy."""


MASKS = ("mask", "weights", "logprobs")
"""Inputs of a loss that are zero at the tokens which were not sampled."""


def datum_arrays(data: Sequence[Any], **fields: Any) -> dict[str, Any]:
    """Return the arrays of a step from Tinker's data; `fields` have a number per datum.

    Example:

        recorder = Recorder("records/tinker", "tinker", {"learning_rate": 1e-4})
        recorder.step(1, datum_arrays(data, scores=rewards, group=group), lr=1e-4)
    """
    rows: dict[str, list[Any]] = {name: [] for name in ("prompts", "responses", *MASKS)}
    rows["advantages"] = []
    for datum in data:
        inputs = {name: tensor.tolist() for name, tensor in datum.loss_fn_inputs.items()}
        tokens = [*datum.model_input.to_ints()[:1], *inputs["target_tokens"]]
        mask = next(inputs[name] for name in MASKS if name in inputs)
        begin = next((n for n, inside in enumerate(mask) if inside), len(mask))
        rows["prompts"].append(tokens[: begin + 1])
        rows["responses"].append(tokens[begin + 1 :])
        rows["mask"].append([x != 0 for x in mask[begin:]])
        for name in ("logprobs", "advantages"):
            rows[name].append(inputs[name][begin:] if name in inputs else None)
    known = {name: None if None in values else values for name, values in rows.items()}
    return ragged(
        rows["prompts"],
        rows["responses"],
        response_mask=rows["mask"],
        rollout_log_probs=known["logprobs"],
        advantages=known["advantages"],
        **fields,
    )


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

    Args:
        folder: folder of the record.
        step: number of the step.
        batch: the `DataProto` of the step, after the update.
        config: the configuration of verl's run.
        metrics: the metrics of the step.
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
