"""Responses that are good or bad on their own, for KTO.

    rows = read_labelled("data.train_files", files, tokenizer, max_length=1024, seed=1)
    loader = RowLoader(rows, seed, partial(labelled_batch, pad_token_id=tokenizer.pad_token_id))
    batch = loader.take(64)                 # the columns of `lm_rows`, and `desirable`

A row of a file is a `prompt` with a `completion` (or `response`), a text or messages, and a
`label`, which is true (or 1) if the response is good. A pair as `trainer.data.pairs` reads it makes
two rows.

Each row also has the response to another prompt after its own prompt. The seed chooses it once per
run, so a reference computes its log-probs only once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainer.data.encoded_rows import EncodedRow, LMRow, cut_rows, encode_rows
from trainer.data.files import Row, filled_columns
from trainer.data.lm_rows import lm_batch
from trainer.data.pairs import encode_pair, encode_reply
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.columns import write_columns

logger = logging.getLogger(__name__)
RESPONSES = ("completion", "response")
"""The columns that may hold a row's response."""
LABELS = {"true": True, "1": True, "false": False, "0": False}
"""A label as text, as in CSV files -> its value."""


@dataclass(frozen=True)
class LabelledRow:
    """A response after its prompt, and a response to another prompt after the same prompt."""

    response: LMRow
    mismatched: LMRow
    desirable: bool


def read_labelled(
    key: str,
    files: Any,
    tokenizer: Any,
    max_length: int,
    seed: int,
    on_bad_row: str = "error",
    limit: int | None = None,
) -> list[LabelledRow]:
    """Return the rows of the files that the configuration's `key` names, in order.

    A bad row is an error, or skipped and counted. Rows of more than `max_length` tokens are cut at
    their end; a row without a response is then dropped. A line of the log counts both.
    """
    rows, num_bad = encode_rows(key, files, "labelled", _encode, tokenizer, on_bad_row, limit)
    responses = [
        EncodedRow([side], [label])
        for row in rows
        for side, label in zip(row.sides, row.numbers, strict=True)
    ]
    responses, story = cut_rows(key, "responses", responses, num_bad, max_length, "the response")
    labelled = [(row.sides[0], bool(row.numbers[0])) for row in responses]
    num_good = sum(label for _, label in labelled)
    if num_good in (0, len(labelled)):
        raise ConfigError(
            f"{story}. Of those left {num_good} are good and {len(labelled) - num_good} bad: there "
            "must be some of either."
        )
    logger.info("%s; %d of those left are good", story, num_good)
    return _with_mismatched(labelled, max_length, seed)


def _encode(row: Row, tokenizer: Any) -> EncodedRow:
    responses, labels = zip(*encode_labelled(row, tokenizer), strict=True)
    return EncodedRow(responses, labels)


def encode_labelled(row: Row, tokenizer: Any) -> list[tuple[LMRow, bool]]:
    """Return the responses of a row with their labels; a ValueError says what is wrong."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        pair = encode_pair(row, tokenizer)
        return [(pair.chosen, True), (pair.rejected, False)]

    columns = [name for name in RESPONSES if row.get(name) is not None]
    if not columns or row.get("prompt") is None or row.get("label") is None:
        raise ValueError(
            "it has neither 'prompt', 'completion' and 'label', nor 'chosen' and 'rejected'; there "
            f"is {filled_columns(row)}"
        )
    response = encode_reply(row["prompt"], row[columns[0]], tokenizer, row.get("finish_reason"))
    return [(response, _label(row))]


def _label(row: Row) -> bool:
    label = row["label"]
    text = str(label).lower()
    if text not in LABELS:
        raise ValueError(f"'label' is {label!r}, neither true nor false")
    return LABELS[text]


def _with_mismatched(
    labelled: Sequence[tuple[LMRow, bool]], max_length: int, seed: int
) -> list[LabelledRow]:
    """Return the rows, each with the response of another row in an order from the seed.

    In this order the rows of a prompt are neighbours. The other row is as many places further as
    the largest such group has rows, so its prompt differs, unless more than half of the rows have
    the same prompt.
    """
    order = np.random.default_rng([seed, len(labelled)]).permutation(len(labelled)).tolist()
    prompts = [row.ids[: row.in_loss.argmax()].tobytes() for row, _ in labelled]
    groups: dict[bytes, list[int]] = {}
    for number in order:
        groups.setdefault(prompts[number], []).append(number)
    together = [number for group in groups.values() for number in group]
    shift = max(map(len, groups.values())) if len(groups) > 1 else 1
    others = dict(zip(together, np.roll(together, -shift).tolist(), strict=True))
    rows = []
    for number, (response, label) in enumerate(labelled):
        other, _ = labelled[others[number]]
        mismatched = _spliced(response, other, max_length)
        rows.append(LabelledRow(response, mismatched, label))
    return rows


def _spliced(row: LMRow, other: LMRow, max_length: int) -> LMRow:
    """Return the prompt of `row` with the response of `other`."""
    prompt, response = int(row.in_loss.argmax()), int(other.in_loss.argmax())
    ids = np.concatenate([row.ids[:prompt], other.ids[response:]])
    in_loss = np.concatenate([row.in_loss[:prompt], other.in_loss[response:]])
    return LMRow(ids, in_loss).cut(max_length)


def labelled_batch(
    rows: Sequence[LabelledRow], uids: Sequence[str], pad_token_id: int
) -> DataProto:
    """Return a batch of responses with the column `desirable`."""
    batch = lm_batch([row.response for row in rows], uids, pad_token_id)
    return write_columns(batch, desirable=torch.tensor([row.desirable for row in rows]))
