"""Rows of files as tokens; a bad one stops the run, or is left out.

`trainer.data.lm_rows` and `trainer.data.pairs` say what tokens are made of a row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

from trainer.data.files import Row, names_of, rows_of_files, why_no_row
from verl_like.errors import ConfigError

logger = logging.getLogger(__name__)
T = TypeVar("T")
WAY_OUT = " Mend it, or leave such rows out with data.on_bad_row=skip."


def encode_rows(
    key: str, files: Any, encode: Callable[[Row], T], on_bad_row: str | None
) -> tuple[list[T], int]:
    """What `encode` makes of the rows in order, and how many were skipped.

    `key` is the configuration's that names the files. A ValueError of `encode` says what is wrong
    with a row: with `on_bad_row` skip the row is left out, otherwise it stops the run. None is that
    of a recipe without the key `data.on_bad_row`.
    """
    names = names_of(files)
    found: list[T] = []
    num_bad = 0
    for where, row in rows_of_files(names, key):
        try:
            if problem_of_row := why_no_row(row):
                raise ValueError(problem_of_row)
            found.append(encode(row))
        except ValueError as problem:
            if on_bad_row != "skip":
                raise ConfigError(
                    f"{where}: {problem}.{WAY_OUT if on_bad_row else ''}"
                ) from problem
            num_bad += 1
            if num_bad == 1:
                logger.warning("%s: %s; it and others like it are skipped.", where, problem)
    return found, num_bad


def how_many(key: str, kind: str, num_rows: int, num_bad: int) -> str:
    """How many rows there are, for a line of the log."""
    skipped = f", {num_bad} bad ones skipped" if num_bad else ""
    return f"{key} holds {num_rows + num_bad} {kind}{skipped}"
