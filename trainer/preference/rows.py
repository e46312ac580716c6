"""The rows that a preference loss learns, pairs or responses with a label, and their columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trainer.data.encoded_rows import LMRow
from trainer.data.labelled import LabelledRow
from trainer.data.pairs import PairRow

NumberedRow = tuple[int, PairRow | LabelledRow]
"""A row with its place among those of its files, which the reference's log-probs are found by."""


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
