"""Samples: rows of several batches as one, rewards by their names, and a step's samples as text.

`rollouts/N.jsonl` holds those of step N, `validation/N.jsonl` those of the validation after it. Of
the newest steps they are whole, of older ones a few are left (`thin_samples`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.rollouts.turns import EPISODE, turn_fields
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError, nearest
from verl_like.files import json_lines, write_whole
from workers.columns import PLAYERS, has_column, player_uid, read_columns, token_rows
from workers.rewards.decoding import decode_rows
from workers.rewards.manager import decode_responses

EXTRA = "reward_extra/"
"""How the columns begin that hold what a reward function returned beside its score."""


def repeat_prompts(prompts: DataProto, num_samples: int) -> DataProto:
    """A row for each sample of every prompt, numbered among those of its prompt.

    The samples of a prompt whose environment has several players go to the players in turn. The
    players of an environment are rows that follow each other; there is at least one environment.
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
    """All rows in order; a number that only some parts have is nan in the others.

    Of one part nothing is copied.
    """
    if len(parts) == 1:
        return parts[0].select()
    names = {name for part in parts for name in part.non_tensor_batch}
    whole = [part.select() for part in parts]
    for part in whole:
        for name in names - part.non_tensor_batch.keys():
            part.non_tensor_batch[name] = np.full(len(part), np.nan)
    return DataProto.concat(whole)


def write_samples(
    folder: Path,
    step: int,
    batch: DataProto,
    tokenizer: Any,
    more: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """`<folder>/<step>.jsonl`: a line a sample, with verl's names and what the rule returned.

    `more` has fields of the recipe's own, each with a value for every row.
    """
    fields = {"step": [step] * len(batch), **_fields(batch, tokenizer), **(more or {})}
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
    fields |= turn_fields(batch, tokenizer)
    if has_column(batch, "policy_version"):
        fields["weight_version"] = read_columns(batch, "policy_version")["policy_version"].tolist()
    for name, column in columns.items():
        if name.startswith(EXTRA):
            values = [None if _is_nan(value) else value for value in column.tolist()]
            fields[name.removeprefix(EXTRA)] = values
    return fields


def _prompt_texts(batch: DataProto, tokenizer: Any) -> list[str]:
    """Every row's prompt; the samples of one uid have one, which is decoded once.

    An environment may begin each in a way of its own.
    """
    rows, masks = token_rows(batch, "prompts", "attention_mask")
    uids = batch.non_tensor_batch["uid"]
    if EPISODE in batch.non_tensor_batch:
        uids = np.arange(len(batch))
    row_of = {uid: row for row, uid in enumerate(uids)}

    prompts = []
    for row in row_of.values():
        prompts.append(rows[row][masks[row][: len(rows[row])] != 0].tolist())
    decoded = decode_rows(tokenizer, prompts)
    texts = dict(zip(row_of, decoded, strict=True))
    return [texts[uid] for uid in uids]


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)


BYTES_OF_OLD_STEP = 2048
"""What stays of a step's samples at most; one sample stays, however long."""


def thin_samples(path: Path, limit: int = BYTES_OF_OLD_STEP) -> None:
    """Leave the best, the worst, and others spread between them, as many as there is room for."""
    if not path.is_file() or path.stat().st_size <= limit:
        return
    lines = path.read_bytes().splitlines(keepends=True)
    by_score = sorted(range(len(lines)), key=lambda row: _score(lines[row]))
    kept: list[int] = []
    room = limit
    for row in _extremes_first(by_score):
        if not kept or len(lines[row]) <= room:
            kept.append(row)
            room -= len(lines[row])
    write_whole(path, b"".join(lines[row] for row in sorted(kept)), to_disk=False)


def thin_old_samples(folder: Path, last: int) -> None:
    """Of the steps up to `last` a few samples are left; steps without any are passed over."""
    for path in folder.glob("*.jsonl"):
        if path.stem.isdecimal() and int(path.stem) <= last:
            thin_samples(path)


def _extremes_first(ordered: Sequence[int]) -> list[int]:
    """Last, first, then the middle of the gaps between, the widest gap first."""
    order, gaps = [ordered[-1]], [(0, len(ordered) - 1)]
    if len(ordered) > 1:
        order.append(ordered[0])
    for low, high in gaps:  # grows while it is read
        middle = (low + high) // 2
        if middle not in (low, high):
            order.append(ordered[middle])
            gaps += [(low, middle), (middle, high)]
    return order


def _score(line: bytes) -> float:
    score = json.loads(line).get("score")
    return float(score) if isinstance(score, int | float) else 0.0


SCORE = "seq_reward"
"""The name of the score itself."""


def read_named_reward(batch: DataProto, name: str, key: str) -> Tensor:
    """One number per sample; nan where the function returned none under that name.

    `key` is the configuration key that names it.
    """
    if name == SCORE:
        return read_columns(batch, "token_level_scores")["token_level_scores"].sum(dim=-1)

    columns = batch.non_tensor_batch
    if EXTRA + name not in columns:
        extras = sorted(column for column in columns if column.startswith(EXTRA))
        valid = [SCORE, *(column.removeprefix(EXTRA) for column in extras)]
        raise ConfigError(
            f"{key}={name}: choose {SCORE}, or a number that the reward function returns beside "
            f"its score; here: {', '.join(valid)}.{nearest(name, valid)}"
        )
    return torch.from_numpy(columns[EXTRA + name].astype(np.float64))
