"""Functions on samples: repeat prompts, join batches, read rewards by name, write text files.

`rollouts/N.jsonl` has the samples of step N, and `validation/N.jsonl` has the samples of the
validation after step N. The files of older steps may be thinned out (`thin_samples`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, nearest
from verl_like.files import json_lines, write_atomic
from workers.columns import (
    IMAGES,
    PLAYERS,
    TRAJECTORY,
    player_uid,
    read_column,
    sample_scores,
    token_rows,
)
from workers.rewards.manager import decode_responses, decode_rows

EXTRA = "reward_extra/"
"""Prefix of columns with numbers that a reward function returned in addition to the score."""


def repeat_prompts(prompts: DataProto, num_samples: int) -> DataProto:
    """Return one row for each sample of each prompt, with its `sample_index`.

        samples = repeat_prompts(batch, num_samples=4)      # 4 rows per prompt, next to each other

    If the environment of a prompt has several players, the prompt's samples are divided among them.
    The rows of one environment are adjacent, one per player. Every prompt has at least one
    environment.

    Args:
        prompts: one row per prompt.
        num_samples: samples per prompt.
    """
    players = prompts.non_tensor_batch.get(PLAYERS)
    if players is None:
        batch = prompts.repeat(num_samples, interleave=True)
        index = torch.arange(num_samples).repeat(len(prompts))
        return batch.union(DataProto.from_dict({"sample_index": index}))
    samples = [
        (row, player_uid(prompts.non_tensor_batch["uid"][row], player), number)
        for row, names in enumerate(players)
        for number in range(max(num_samples // max(len(names), 1), 1))
        for player in names or [""]
    ]
    rows, uids, numbers = zip(*samples, strict=True)
    batch = prompts.select_idxs(list(rows))
    batch.non_tensor_batch["uid"] = object_rows(uids)
    return batch.union(DataProto.from_dict({"sample_index": torch.tensor(numbers)}))


def concat_rows(parts: Sequence[DataProto]) -> DataProto:
    """Join the rows of all parts in order, with nan where a part lacks a non-tensor column.

    A single part is not copied.
    """
    if len(parts) == 1:
        return parts[0].select()
    names = {name for part in parts for name in part.non_tensor_batch}
    copies = [part.select() for part in parts]
    for part in copies:
        for name in names - part.non_tensor_batch.keys():
            part.non_tensor_batch[name] = np.full(len(part), np.nan)
    return DataProto.concat(copies)


def write_samples(
    folder: Path,
    step: int,
    batch: DataProto,
    tokenizer: Any,
    fields_of_recipe: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Write `<folder>/<step>.jsonl`: a line per sample, with verl's names and the rewards' numbers.

    `fields_of_recipe` are further fields of a recipe, each with one value per row.
    """
    fields = {"step": [step] * len(batch), **_fields(batch, tokenizer), **(fields_of_recipe or {})}
    rows = (dict(zip(fields, values, strict=True)) for values in zip(*fields.values(), strict=True))
    lines = json_lines(rows, _plain)

    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{step}.jsonl", lines, to_disk=False)


def _fields(batch: DataProto, tokenizer: Any) -> dict[str, list[Any]]:
    """Map the name of each field to its values, one per row."""
    columns = batch.non_tensor_batch
    # samples of one uid share a prompt, unless the environment adds to each prompt differently
    rows, masks = token_rows(batch, "prompts", "attention_mask")
    uids = columns["uid"]
    if TRAJECTORY in columns:
        uids = np.arange(len(batch))
    row_of = {uid: row for row, uid in enumerate(uids)}
    prompts = [rows[n][masks[n][: len(rows[n])] != 0].tolist() for n in row_of.values()]
    texts = dict(zip(row_of, decode_rows(tokenizer, prompts), strict=True))

    fields = {
        "uid": columns["uid"].tolist(),
        "sample": read_column(batch, "sample_index").tolist(),
        "data_source": columns["data_source"].tolist(),
        "input": [texts[uid] for uid in uids],
        "output": decode_responses(batch, tokenizer),
        "gts": [rule["ground_truth"] for rule in columns["reward_model"]],
        "score": sample_scores(batch).tolist(),
    }
    if IMAGES in columns:
        images = [
            [{"path": path, "sha": sha} for path, sha, *_ in refs] for refs in columns[IMAGES]
        ]
        fields["images"] = images
    if TRAJECTORY in columns:
        from trainer.rollouts.turns import turn_fields

        fields |= turn_fields(batch, tokenizer)
    if "policy_version" in batch.columns:
        fields["weight_version"] = read_column(batch, "policy_version").tolist()
    for name, column in columns.items():
        if name.startswith(EXTRA):
            values = [None if isinstance(v, float) and v != v else v for v in column.tolist()]
            fields[name.removeprefix(EXTRA)] = values
    return fields


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


BYTES_OF_OLD_STEP = 2048
"""Maximum bytes of an old step's file, unless it has only two samples."""


def thin_samples(path: Path) -> None:
    """Keep only the best and the worst sample of a file of more than `BYTES_OF_OLD_STEP` bytes."""
    if not path.is_file() or path.stat().st_size <= BYTES_OF_OLD_STEP:
        return
    lines = path.read_bytes().splitlines(keepends=True)
    by_score = sorted(range(len(lines)), key=lambda row: _score(lines[row]))
    rows = sorted({by_score[0], by_score[-1]})
    write_atomic(path, b"".join(lines[row] for row in rows), to_disk=False)


def thin_old_samples(folder: Path, last: int) -> None:
    """Thin out every file of `folder` whose step is `last` or earlier."""
    for path in folder.glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) <= last:
            thin_samples(path)


def _score(line: bytes) -> float:
    score = json.loads(line).get("score")
    return float(score) if isinstance(score, int | float) else 0.0


SCORE = "seq_reward"
"""The name by which keys refer to the score."""


def read_named_reward(batch: DataProto, name: str, key: str) -> Tensor:
    """Return the number with that name for each sample, or nan if the function returned none.

    `key` is the configuration key that contains the name.
    """
    if name == SCORE:
        return sample_scores(batch)

    columns = batch.non_tensor_batch
    if EXTRA + name not in columns:
        extras = sorted(column for column in columns if column.startswith(EXTRA))
        valid = [SCORE, *(column.removeprefix(EXTRA) for column in extras)]
        raise ConfigError(
            f"{key}={name}: choose {SCORE}, or a number that the reward function returns "
            f"with its score; here: {', '.join(valid)}.{nearest(name, valid)}"
        )
    return torch.from_numpy(columns[EXTRA + name].astype(np.float64))
