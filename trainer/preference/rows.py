"""The rows that a preference loss learns, pairs or responses with a label, and their columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.data.encoded_rows import LMRow
from trainer.data.labelled import LabelledRow, labelled_batch, read_labelled
from trainer.data.pairs import PairRow, pair_batch, read_pairs
from trainer.preference.recipe import PreferenceConfig
from trainer.rows.preflight import longest_row
from verl_like.batch.protocol import DataProto
from workers.columns import write_columns
from workers.config.preference import loss_reads

NumberedRow = tuple[int, PairRow | LabelledRow]
"""A row with its place among those of its files, which the reference's log-probs are found by."""


def read_rows(config: PreferenceConfig, key: str, files: Any, tokenizer: Any) -> list[NumberedRow]:
    """The rows of the files that the configuration's `key` names."""
    length, on_bad_row = longest_row(config), config.data.on_bad_row
    if loss_reads(config, "desirable"):
        seed = config.trainer.seed
        return list(enumerate(read_labelled(key, files, tokenizer, length, seed, on_bad_row)))
    return list(enumerate(read_pairs(key, files, tokenizer, length, on_bad_row)))


def make_batch(rows: Sequence[NumberedRow], uids: Sequence[str], pad_token_id: int) -> DataProto:
    """Rows padded on the right, each with its `row_number`."""
    labelled = [row for _, row in rows if isinstance(row, LabelledRow)]
    pairs = [row for _, row in rows if isinstance(row, PairRow)]
    if labelled:
        batch = labelled_batch(labelled, uids, pad_token_id)
    else:
        batch = pair_batch(pairs, uids, pad_token_id)
    return write_columns(batch, row_number=torch.tensor([number for number, _ in rows]))


def with_mismatched(rows: Sequence[NumberedRow]) -> list[NumberedRow]:
    """The rows with the response of another after their prompt."""
    found: list[NumberedRow] = []
    for number, row in rows:
        assert isinstance(row, LabelledRow), "pairs have no mismatched response"
        found.append((number, replace(row, response=row.mismatched)))
    return found


def both_sides(rows: Sequence[NumberedRow]) -> Iterator[LMRow]:
    """Every response that the reference scores."""
    for _, row in rows:
        if isinstance(row, PairRow):
            yield from (row.chosen, row.rejected)
        else:
            yield from (row.response, row.mismatched)


def labelled_columns(
    mismatched: Tensor, ref_mismatched: Tensor, desirable: Tensor
) -> dict[str, Tensor]:
    """What a loss of rows with a label reads of the whole batch.

    Log-probs of the mismatched responses give the estimate of the KL: their mean log-ratio, zero at
    least.
    """
    kl = (mismatched - ref_mismatched).mean().clamp(min=0)
    share = desirable.double().mean()
    return {
        "desirable": desirable,
        "mismatched_kl": kl.expand(len(desirable)).clone(),
        "label_share": torch.where(desirable, share, 1 - share),
    }
