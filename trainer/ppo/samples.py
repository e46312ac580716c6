"""Samples: rows of several batches as one, and a step's samples as text.

`rollouts/N.jsonl` holds those of step N, `validation/N.jsonl` those of the validation after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_like.batch.protocol import DataProto
from verl_like.files import json_lines, write_whole
from workers.columns import read_columns
from workers.rewards.decoding import decode_rows
from workers.rewards.manager import decode_responses

EXTRA = "reward_extra/"
"""How the columns begin that hold what a reward function returned beside its score."""


def repeat_prompts(prompts: DataProto, num_samples: int) -> DataProto:
    """A row for each sample of every prompt, numbered among those of its prompt."""
    batch = prompts.repeat(num_samples, interleave=True)
    index = torch.arange(num_samples).repeat(len(prompts))
    return batch.union(DataProto.from_dict({"sample_index": index}))


def concat_rows(parts: Sequence[DataProto]) -> DataProto:
    """All rows in order; a number that only some parts have is nan in the others.

    Of one part nothing is copied.
    """
    if len(parts) == 1:
        return parts[0].select()
    names = {name for part in parts for name in part.non_tensor_batch}
    for part in parts:
        for name in names - part.non_tensor_batch.keys():
            part.non_tensor_batch[name] = np.full(len(part), np.nan)
    return DataProto.concat(parts)


def write_samples(folder: Path, step: int, batch: DataProto, tokenizer: Any) -> None:
    """`<folder>/<step>.jsonl`: a line a sample, with verl's names and what the rule returned."""
    fields = {"step": [step] * len(batch), **_fields(batch, tokenizer)}
    rows = (dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True))
    lines = json_lines(rows, _plain)

    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / f"{step}.jsonl", lines, to_disk=False)


def _fields(batch: DataProto, tokenizer: Any) -> dict[str, list[Any]]:
    """Name of a field -> its value for every row."""
    read = read_columns(batch, "token_level_scores", "sample_index")
    columns = batch.non_tensor_batch
    fields = {
        "uid": columns["uid"].tolist(),
        "sample": read["sample_index"].tolist(),
        "data_source": columns["data_source"].tolist(),
        "input": _prompt_texts(batch, tokenizer),
        "output": decode_responses(batch, tokenizer),
        "gts": [rule["ground_truth"] for rule in columns["reward_model"]],
        "score": read["token_level_scores"].sum(-1).tolist(),
    }
    for name, column in columns.items():
        if name.startswith(EXTRA):
            values = [None if _is_nan(value) else value for value in column.tolist()]
            fields[name.removeprefix(EXTRA)] = values
    return fields


def _prompt_texts(batch: DataProto, tokenizer: Any) -> list[str]:
    """Every row's prompt; the samples of one uid have one, which is decoded once."""
    read = read_columns(batch, "prompts", "attention_mask")
    rows = read["prompts"].numpy()
    mask = read["attention_mask"][:, : rows.shape[-1]].bool().numpy()
    uids = batch.non_tensor_batch["uid"]
    row_of = {uid: row for row, uid in enumerate(uids)}

    prompts = [rows[row][mask[row]].tolist() for row in row_of.values()]
    decoded = decode_rows(tokenizer, prompts)
    texts = dict(zip(row_of, decoded, strict=True))
    return [texts[uid] for uid in uids]


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
