"""Rows of files as tokens; a bad one stops the run, or is left out.

A `RowKind` says what tokens are made of a row: those of texts and chats, pairs, labelled responses.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from trainer.data.cache import what_tokens_depend_on
from trainer.data.files import names_of, rows_of_files, why_no_row
from trainer.data.row_table import RowKind, cached_rows
from verl_like.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")
WAY_OUT = " Mend it, or leave such rows out with data.on_bad_row=skip."


def encode_rows(
    key: str, files: Any, kind: RowKind[T], tokenizer: Any, on_bad_row: str | None
) -> tuple[list[T], int]:
    """What `kind` makes of the rows in order, and how many were skipped.

    `key` is the configuration's that names the files; large ones are read and tokenized once.
    With `on_bad_row` skip a bad row is left out, otherwise it stops the run. None is that of a
    recipe without the key `data.on_bad_row`.
    """
    names = names_of(files)

    def read() -> Iterator[T | None]:
        return _encoded(key, names, kind, tokenizer, on_bad_row)

    depends_on = what_tokens_depend_on(names, tokenizer)
    if depends_on is not None:
        depends_on |= {"rows": kind.name, "on_bad_row": on_bad_row}
        depends_on |= {"eos_token_id": tokenizer.eos_token_id}
        found = cached_rows(kind, depends_on, read)
        if found is not None:
            return found

    encoded = list(read())
    rows = [row for row in encoded if row is not None]
    return rows, len(encoded) - len(rows)


def _encoded(
    key: str, names: Sequence[str], kind: RowKind[T], tokenizer: Any, on_bad_row: str | None
) -> Iterator[T | None]:
    """One by one; None for a row that is skipped."""
    was_one_skipped = False
    for where, row in rows_of_files(names, key):
        try:
            if problem_of_row := why_no_row(row):
                raise ValueError(problem_of_row)
            encoded: T | None = kind.encode(row, tokenizer)
        except ValueError as problem:
            if on_bad_row != "skip":
                raise ConfigError(
                    f"{where}: {problem}.{WAY_OUT if on_bad_row else ''}"
                ) from problem
            if not was_one_skipped:
                logger.warning("%s: %s; it and others like it are skipped.", where, problem)
            was_one_skipped, encoded = True, None
        yield encoded


def how_many(key: str, kind: str, num_rows: int, num_bad: int) -> str:
    """How many rows there are, for a line of the log."""
    skipped = f", {num_bad} bad ones skipped" if num_bad else ""
    return f"{key} holds {num_rows + num_bad} {kind}{skipped}"
