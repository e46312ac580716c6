"""The samples of a step or of a validation as text: `rollouts/N.jsonl` and `validation/N.jsonl`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from verl_like.batch.protocol import DataProto
from verl_like.files import write_whole
from workers.columns import read_columns
from workers.rewards.pool import decode_responses


def write_samples(folder: Path, step: int, batch: DataProto, tokenizer: Any) -> None:
    """`<folder>/<step>.jsonl`: a line a sample, with verl's names and every number of the reward
    function.
    """
    folder.mkdir(parents=True, exist_ok=True)
    read = read_columns(batch, "prompts", "attention_mask", "token_level_scores", "sample_index")
    width = read["prompts"].shape[-1]
    mask = read["attention_mask"][:, :width].bool()
    columns = batch.non_tensor_batch
    row_of = {
        uid: row for row, uid in enumerate(columns["uid"])
    }  # the samples of one uid have its prompt
    prompts = [read["prompts"][row][mask[row]].tolist() for row in row_of.values()]
    texts = dict(
        zip(row_of, tokenizer.batch_decode(prompts, skip_special_tokens=True), strict=True)
    )
    extras = {
        name.removeprefix("reward_extra/"): columns[name]
        for name in columns
        if name.startswith("reward_extra/")
    }
    fields = {
        "uid": columns["uid"].tolist(),
        "sample": read["sample_index"].tolist(),
        "data_source": columns["data_source"].tolist(),
        "input": [texts[uid] for uid in columns["uid"]],
        "output": decode_responses(batch, tokenizer),
        "gts": [rule["ground_truth"] for rule in columns["reward_model"]],
        "score": read["token_level_scores"].sum(-1).tolist(),
        **{
            name: [None if _is_nan(value) else value for value in column.tolist()]
            for name, column in extras.items()
        },
    }
    lines = [
        json.dumps(
            {"step": step, **dict(zip(fields, values, strict=True))},
            ensure_ascii=False,
            default=_plain,
        )
        for values in zip(*fields.values(), strict=True)
    ]
    write_whole(folder / f"{step}.jsonl", "".join(f"{line}\n" for line in lines), to_disk=False)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
