"""Rows of files as tokens; a bad one stops the run, or is left out.

A `RowKind` says what tokens are made of a row: those of texts and chats, pairs, labelled responses.
Rows of large files are kept in the cache on disk; later runs have arrays that are views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.data import cache
from trainer.data.cache import Table, cached_table, what_tokens_depend_on
from trainer.data.files import Row, good_rows, names_of, rows_of_files

T = TypeVar("T")
Side = tuple[NDArray[np.int64], NDArray[np.bool_]]
"""Tokens, and which of them are in the loss."""
Parts = tuple[Sequence[Side], Sequence[float]]
"""The sides of a row, and the numbers beside them."""


@dataclass(frozen=True)
class RowKind(Generic[T]):
    """What a recipe makes of the rows of a file."""

    name: str
    """Tells entries of other kinds from these."""
    encode: Callable[[Row, Any], T]
    """(row, tokenizer) -> what is made of it; a ValueError says what is wrong with the row."""
    to_parts: Callable[[T], Parts]
    """What is kept of that."""
    of_parts: Callable[[Parts], T]
    """The same, from what is kept."""


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
        rows = rows_of_files(names, key)
        return good_rows(rows, lambda where, row: kind.encode(row, tokenizer), on_bad_row)

    depends_on = what_tokens_depend_on(names, tokenizer)
    if depends_on is not None:
        depends_on |= {"rows": kind.name, "on_bad_row": on_bad_row}
        depends_on |= {"eos_token_id": tokenizer.eos_token_id}
        table = _cached(kind, depends_on, read)
        if table is not None:
            return [kind.of_parts(parts) for parts in _parts_of(table)], table.facts["num_bad"]

    encoded = list(read())
    rows = [row for row in encoded if row is not None]
    return rows, len(encoded) - len(rows)


def _cached(
    kind: RowKind[T], depends_on: dict[str, Any], read: Callable[[], Iterator[T | None]]
) -> Table | None:
    """Tokens and loss mask of every row's sides, one after the other, and its numbers."""
    import pyarrow as pa

    columns = {
        "lengths": pa.list_(pa.int32()),
        "ids": pa.list_(pa.int64()),
        "in_loss": pa.list_(pa.uint8()),
        "facts": pa.list_(pa.float64()),
    }
    facts = {"num_bad": 0}

    def blocks() -> Iterator[Sequence[Sequence[Any]]]:
        rows = read()
        while block := list(islice(rows, cache.ROWS_PER_BLOCK)):
            parts = [kind.to_parts(row) for row in block if row is not None]
            facts["num_bad"] += len(block) - len(parts)
            yield (
                [[len(ids) for ids, _ in sides] for sides, _ in parts],
                [np.concatenate([ids for ids, _ in sides]) for sides, _ in parts],
                [np.concatenate([mask for _, mask in sides]).view(np.uint8) for sides, _ in parts],
                [list(numbers) for _, numbers in parts],
            )

    return cached_table("rows", depends_on, columns, blocks, lambda: facts)


def _parts_of(table: Table) -> Iterator[Parts]:
    for block in table.blocks:
        ids = block.column("ids").values.to_numpy()
        in_loss = block.column("in_loss").values.to_numpy().view(np.bool_)
        begin = 0
        lengths, facts = block.column("lengths").to_pylist(), block.column("facts").to_pylist()
        for its_lengths, its_facts in zip(lengths, facts, strict=True):
            ends = np.cumsum([begin, *its_lengths]).tolist()
            pairs = zip(ends[:-1], ends[1:], strict=True)
            yield [(ids[first:end], in_loss[first:end]) for first, end in pairs], its_facts
            begin = ends[-1]


def how_many(key: str, kind: str, num_rows: int, num_bad: int) -> str:
    """How many rows there are, for a line of the log."""
    skipped = f", {num_bad} bad ones skipped" if num_bad else ""
    return f"{key} holds {num_rows + num_bad} {kind}{skipped}"
