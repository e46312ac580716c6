"""The rows of a preference loss, pairs or responses with a label, and their columns."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from trainer.data.encoded_rows import LMRow, stop_tokens, without_blanks
from trainer.data.labelled import LabelledRow
from trainer.data.pairs import PairRow
from trainer.preference.recipe import PreferenceConfig

logger = logging.getLogger(__name__)

NumberedRow = tuple[int, PairRow | LabelledRow]
"""A row with its number in its files, by which the reference's log-probs are looked up."""


def settle_ends(
    key: str, rows: Sequence[NumberedRow], tokenizer: Any, config: PreferenceConfig
) -> list[NumberedRow]:
    """Return the rows with or without the blanks that their template wrote after an end token.

    A log line reports it. `key` names their files.
    """
    stops = stop_tokens(tokenizer, config.model.path)
    shortened: list[NumberedRow] = []
    num_longer = 0
    for number, row in rows:
        names = ("chosen", "rejected") if isinstance(row, PairRow) else ("response", "mismatched")
        sides: dict[str, Any] = {
            name: without_blanks(getattr(row, name), stops, tokenizer) for name in names
        }
        num_longer += any(len(side.ids) < len(getattr(row, x).ids) for x, side in sides.items())
        shortened.append((number, replace(row, **sides)))
    is_cut = config.data.after_end == "cut"
    if num_longer:
        outcome = "cut there" if is_cut else "kept in the loss; data.after_end=cut leaves it out"
        logger.info("%s: blanks after the end token of %d rows are %s", key, num_longer, outcome)
    return shortened if is_cut else list(rows)


def with_mismatched(rows: Sequence[NumberedRow]) -> list[NumberedRow]:
    """Return the rows with the response to another prompt after theirs."""
    result: list[NumberedRow] = []
    for number, row in rows:
        assert isinstance(row, LabelledRow), "pairs have no mismatched response"
        result.append((number, replace(row, response=row.mismatched)))
    return result


def both_sides(rows: Sequence[NumberedRow]) -> Iterator[LMRow]:
    """Yield every response that the reference scores."""
    for _, row in rows:
        if isinstance(row, PairRow):
            yield from (row.chosen, row.rejected)
        else:
            yield from (row.response, row.mismatched)


def labelled_columns(
    mismatched: Tensor, ref_mismatched: Tensor, desirable: Tensor
) -> dict[str, Tensor]:
    """Return the columns that a loss of labelled rows reads from the whole batch.

    The log-probs of the mismatched responses estimate the KL: their mean log-ratio, at least zero.
    """
    kl = (mismatched - ref_mismatched).mean().clamp(min=0)
    share = desirable.double().mean()
    return {
        "desirable": desirable,
        "mismatched_kl": kl.expand(len(desirable)).clone(),
        "label_share": torch.where(desirable, share, 1 - share),
    }
