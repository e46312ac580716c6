"""Pairs of responses, one chosen over the other, for reward models and preference losses.

    rows = read_pairs("data.train_files", files, tokenizer, max_length=1024)
    loader = RowLoader(rows, seed, partial(pair_batch, pad_token_id=tokenizer.pad_token_id))
    batch = loader.next_batch(64)             # [64, 2, T] columns for `passes/forward_backward.py`

A row has one of these sets of columns. It may also have a `margin`, which says how much better the
chosen response is:

- `prompt`, `chosen` and `rejected`: a prompt with two responses, as in rm-static.
- `chosen` and `rejected` as chats, with the prompt's messages at the start of both or in `prompt`.
- `chosen` and `rejected` as texts: whole dialogues with a common beginning, as in Anthropic-HH.

For KTO, each response is labeled as good or bad (`read_labeled`). A row has a `prompt`, a
`completion` (or `response`), which is a text or messages, and a `label`, which is true (or 1) if
the response is good. A pair makes two rows. Each row also has a second sequence: its own prompt,
followed by another row's response. The seed chooses that response once per run, so a reference
computes its log-probs only once.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer.data.files import NoColumn, Row, filled_columns
from trainer.data.lm_rows import (
    EncodedRow,
    LMRow,
    check_lm_row,
    cut_rows,
    encode_lm_row,
    encode_reply,
    encode_rows,
    image_column,
    lm_batch,
    lm_columns,
    reply_row,
    teaches,
)
from trainer.data.media import ReadColumns
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import ColumnValues
from verl_like.errors import ConfigError
from workers.columns import write_columns

if TYPE_CHECKING:
    from workers.images import ImageRef

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PairRow:
    """The tokens of both sides, with their responses in the loss."""

    chosen: LMRow
    rejected: LMRow
    margin: float = 0.0

    @property
    def sides(self) -> dict[str, LMRow]:
        """Both rows, by the names of their fields."""
        return {"chosen": self.chosen, "rejected": self.rejected}

    @property
    def images(self) -> Sequence[ImageRef]:
        """References to the images, which both sides have."""
        return self.chosen.images


def read_pairs(
    key: str,
    files: Any,
    tokenizer: Any,
    max_length: int,
    on_bad_row: str = "error",
    limit: int | None = None,
) -> list[PairRow]:
    """Return the pairs of the files that the configuration's `key` names, in order.

    A bad row raises an error; with `on_bad_row="skip"`, it is skipped and counted. Sides of more
    than `max_length` tokens are cut at their end; a pair is then dropped if a side has no response
    left, or if both sides are equal. A log line reports these numbers.
    """

    def encode(row: Row, tokenizer: Any) -> EncodedRow:
        pair = encode_pair(row, tokenizer)
        return EncodedRow([pair.chosen, pair.rejected], [pair.margin])

    encoded, num_bad = encode_rows(
        key, files, "pairs", pair_columns_of, encode, tokenizer, on_bad_row, limit
    )
    why = "a response is empty, or both sides are equal"
    rows, story = cut_rows(key, "pairs", encoded, num_bad, max_length, why)
    logger.info("%s", story)
    return [PairRow(row.sides[0], row.sides[1], row.numbers[0]) for row in rows]


def pair_columns_of(row: Row) -> ReadColumns:
    """Return the columns of a row that `encode_pair` reads; without a prompt, sides are chats."""
    sides = ("chosen", "rejected")
    return ReadColumns(sides) if row.get("prompt") is None else ReadColumns(["prompt"], sides)


def encode_pair(row: Row, tokenizer: Any) -> PairRow:
    """Return the tokens of both sides of a row; a ValueError says what is wrong with it."""
    check_pair(row)
    chosen, rejected = (_encode_side(row, side, tokenizer) for side in ("chosen", "rejected"))
    if row.get("prompt") is None:
        shortest = min(len(chosen.ids), len(rejected.ids))
        differs = (chosen.ids[:shortest] != rejected.ids[:shortest]).nonzero()[0]
        common = int(differs[0]) if len(differs) else shortest - 1
        chosen, rejected = chosen.from_token(common), rejected.from_token(common)
    if np.array_equal(chosen.ids, rejected.ids):
        raise ValueError("'chosen' and 'rejected' are equal after tokenization")
    for name, side in (("chosen", chosen), ("rejected", rejected)):
        if not teaches([side]):
            raise ValueError(f"{name!r} has no token in the loss")
    return PairRow(chosen, rejected, _margin(row))


def check_pair(row: Row) -> None:
    """Raise a ValueError if the row has no valid pair."""
    missing = [name for name in ("chosen", "rejected") if row.get(name) is None]
    if missing:
        error = ValueError if row.keys() >= set(missing) else NoColumn
        labels = "; for rows with a 'label', set loss=kto" if "label" in row else ""
        columns = f"columns: {filled_columns(row)}{labels}"
        raise error(f"it has no {' and no '.join(map(repr, missing))}; {columns}")
    if row["chosen"] == row["rejected"]:
        raise ValueError(f"'chosen' and 'rejected' are equal: {str(row['chosen'])!r:.80}")
    for side in ("chosen", "rejected"):
        try:
            check_lm_row(reply_row(row.get("prompt"), row[side]))
        except ValueError as problem:
            raise ValueError(f"{side!r}: {problem}") from problem
    _margin(row)


def _encode_side(row: Row, side: str, tokenizer: Any) -> LMRow:
    """Return one side of a row; if the row has a prompt, only what follows it is in the loss."""
    reply, prompt = row[side], row.get("prompt")
    try:
        if prompt is None:
            return encode_lm_row(reply_row(prompt, reply), tokenizer)
        return encode_reply(prompt, reply, tokenizer, row.get(f"{side}_finish_reason"))
    except ValueError as problem:
        raise ValueError(f"{side!r}: {problem}") from problem


def _margin(row: Row) -> float:
    margin = row.get("margin")
    if margin is None:
        return 0.0
    try:
        number = math.nan if isinstance(margin, bool) else float(margin)  # CSV files have strings
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"'margin' is {margin!r}, not a finite number")
    return number


def pair_batch(rows: Sequence[PairRow], uids: Sequence[str], pad_token_id: int) -> DataProto:
    """Return [pairs, 2, T] columns of both sides, and each pair's `margin`."""
    sides = [side for row in rows for side in (row.chosen, row.rejected)]
    columns = lm_columns(sides, pad_token_id)
    tensors: dict[str, ColumnValues] = {
        name: column.unflatten(0, (-1, 2)) for name, column in columns.items()
    }
    tensors["margin"] = torch.tensor([row.margin for row in rows])
    others = {"uid": list(uids), **image_column(rows)}
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


RESPONSES = ("completion", "response")
"""The columns that may hold a row's response."""
LABELS = {"true": True, "1": True, "false": False, "0": False}
"""Maps a label as text, such as in CSV files, to its value."""


@dataclass(frozen=True)
class LabeledRow:
    """A response after its prompt, and another row's response after the same prompt."""

    response: LMRow
    mismatched: LMRow
    desirable: bool

    @property
    def sides(self) -> dict[str, LMRow]:
        """Both rows, by the names of their fields."""
        return {"response": self.response, "mismatched": self.mismatched}

    @property
    def images(self) -> Sequence[ImageRef]:
        """References to the images of the prompt."""
        return self.response.images


def read_labeled(
    key: str,
    files: Any,
    tokenizer: Any,
    max_length: int,
    seed: int,
    on_bad_row: str = "error",
    limit: int | None = None,
) -> list[LabeledRow]:
    """Return the rows of the files that the configuration's `key` names, in order.

    A bad row raises an error; with `on_bad_row="skip"`, it is skipped and counted. Rows of more
    than `max_length` tokens are cut at their end; a row that is left without a response is dropped.
    A log line reports these numbers.
    """
    rows, num_bad = encode_rows(
        key, files, "labeled", labeled_columns_of, encode_labeled, tokenizer, on_bad_row, limit
    )
    responses = [
        EncodedRow([side], [label])
        for row in rows
        for side, label in zip(row.sides, row.numbers, strict=True)
    ]
    responses, story = cut_rows(key, "responses", responses, num_bad, max_length, "they are empty")
    labeled = [(row.sides[0], bool(row.numbers[0])) for row in responses]
    num_good = sum(label for _, label in labeled)
    if num_good in (0, len(labeled)):
        raise ConfigError(
            f"{story}. This leaves {num_good} good and {len(labeled) - num_good} bad responses, "
            f"and KTO needs both. Add rows, or raise {key.partition('.')[0]}.max_length if it "
            "caused the drops."
        )
    logger.info("%s; %d of the remaining responses are good", story, num_good)

    # The seed gives an order in which rows with the same prompt are adjacent. Each row gets the
    # response of the row that is `shift` places after it, where `shift` is the size of the largest
    # group. So that row has another prompt, unless more than half of the rows have the same prompt.
    order = np.random.default_rng([seed, len(labeled)]).permutation(len(labeled)).tolist()
    prompts = [(row.ids[: row.in_loss.argmax()].tobytes(), *row.images) for row, _ in labeled]
    groups: dict[tuple[Any, ...], list[int]] = {}
    for number in order:
        groups.setdefault(prompts[number], []).append(number)
    together = [number for group in groups.values() for number in group]
    shift = max(map(len, groups.values())) if len(groups) > 1 else 1
    others = dict(zip(together, np.roll(together, -shift).tolist(), strict=True))
    return [
        LabeledRow(response, _spliced(response, labeled[others[number]][0], max_length), label)
        for number, (response, label) in enumerate(labeled)
    ]


def labeled_columns_of(row: Row) -> ReadColumns:
    """Return the columns of a row that `encode_labeled` reads."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return pair_columns_of(row)
    return ReadColumns(["prompt"], RESPONSES)


def encode_labeled(row: Row, tokenizer: Any) -> EncodedRow:
    """Return the responses of a row with their labels; a ValueError says what is wrong."""
    column = check_labeled(row)
    if column is None:
        pair = encode_pair(row, tokenizer)
        return EncodedRow([pair.chosen, pair.rejected], [True, False])
    response = encode_reply(row["prompt"], row[column], tokenizer, row.get("finish_reason"))
    return EncodedRow([response], [LABELS[str(row["label"]).lower()]])


def check_labeled(row: Row) -> str | None:
    """Return the column of the response, or None for a pair; a ValueError says what is wrong."""
    if row.get("chosen") is not None and row.get("rejected") is not None:
        check_pair(row)
        return None
    columns = [name for name in RESPONSES if row.get(name) is not None]
    if not columns or row.get("prompt") is None or row.get("label") is None:
        error = NoColumn if row.keys().isdisjoint(("chosen", "label")) else ValueError
        raise error(
            "it has neither 'prompt', 'completion' (or 'response') and 'label', nor 'chosen' and "
            f"'rejected'; columns: {filled_columns(row)}"
        )
    check_lm_row(reply_row(row["prompt"], row[columns[0]]))
    if str(row["label"]).lower() not in LABELS:
        raise ValueError(f"'label' is {row['label']!r}, neither true nor false")
    return columns[0]


def _spliced(row: LMRow, other: LMRow, max_length: int) -> LMRow:
    """Return the prompt of `row` with the response of `other`."""
    prompt, response = int(row.in_loss.argmax()), int(other.in_loss.argmax())
    ids = np.concatenate([row.ids[:prompt], other.ids[response:]])
    in_loss = np.concatenate([row.in_loss[:prompt], other.in_loss[response:]])
    return LMRow(ids, in_loss, row.images).cut(max_length)


def labeled_batch(rows: Sequence[LabeledRow], uids: Sequence[str], pad_token_id: int) -> DataProto:
    """Return a batch of responses with the column `desirable`."""
    batch = lm_batch([row.response for row in rows], uids, pad_token_id)
    return write_columns(batch, desirable=torch.tensor([row.desirable for row in rows]))
