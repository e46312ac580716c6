"""Rows of files as tokens; a bad row stops the run, or is left out.

A recipe learns from the sides of a row (one text, the two of a pair, labelled responses) and from
its numbers. Rows of large files are cached on disk; later runs get views of the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer.data.cache import Entry, cache_key, cached_rows
from trainer.data.files import Row, good_rows, names_of, rows_of_files
from workers.models.folder import generation_eos


@dataclass(frozen=True)
class LMRow:
    """The tokens of a text, and which of them are in the loss."""

    ids: NDArray[np.int64]
    in_loss: NDArray[np.bool_]

    def cut(self, max_length: int) -> LMRow:
        """Return the first `max_length` tokens."""
        return LMRow(self.ids[:max_length], self.in_loss[:max_length])


class EncodedRow(NamedTuple):
    """A recipe's tokens and numbers of one row of a file."""

    sides: Sequence[LMRow]
    numbers: Sequence[float] = ()


Encode = Callable[[Row, Any], EncodedRow]
"""(row, tokenizer) -> its tokens. A ValueError tells how the row is wrong."""


def encode_rows(
    key: str,
    files: Any,
    kind: str,
    encode: Encode,
    tokenizer: Any,
    on_bad_row: str | None,
    limit: int | None = None,
) -> tuple[list[EncodedRow], int]:
    """Return the results of `encode` for the rows in order, and the number of skipped rows.

    The configuration's `key` names the files. Large files are read and tokenized once; `kind`
    distinguishes cache entries of the same files. With `on_bad_row` skip a bad row is left out,
    otherwise it stops the run. A recipe without the key `data.on_bad_row` passes None.
    """
    names = names_of(files)

    def read() -> Iterator[EncodedRow | None]:
        rows = rows_of_files(names, key, limit=limit)
        return good_rows(rows, lambda where, row: encode(row, tokenizer), on_bad_row)

    settings = {"rows": kind, "on_bad_row": on_bad_row, "eos_token_id": tokenizer.eos_token_id}
    entry_key = cache_key(names, tokenizer, **settings) if limit is None else None
    entry = None if entry_key is None else _cached(entry_key, read)
    if entry is not None:
        return list(_rows_of(entry)), entry.facts["num_bad"]
    encoded = list(read())
    rows = [row for row in encoded if row is not None]
    return rows, len(encoded) - len(rows)


def _cached(key: str, read: Callable[[], Iterator[EncodedRow | None]]) -> Entry | None:
    """Return tokens and loss mask of every side, and the numbers."""
    import pyarrow as pa

    columns = {
        "ids": pa.list_(pa.list_(pa.int64())),
        "in_loss": pa.list_(pa.list_(pa.uint8())),
        "numbers": pa.list_(pa.float64()),
    }

    def cells() -> Iterator[dict[str, Any] | None]:
        for row in read():
            yield row and {
                "ids": [side.ids for side in row.sides],
                "in_loss": [side.in_loss.view(np.uint8) for side in row.sides],
                "numbers": list(row.numbers),
            }

    return cached_rows("rows", key, columns, cells)


def _rows_of(entry: Entry) -> Iterator[EncodedRow]:
    for block in entry.table.to_batches():
        sides_of_rows = block.column("ids")
        ids = sides_of_rows.values.values.to_numpy()
        in_loss = block.column("in_loss").values.values.to_numpy().view(np.bool_)
        bounds = sides_of_rows.values.offsets.to_numpy().tolist()
        sides = [
            LMRow(ids[begin:end], in_loss[begin:end])
            for begin, end in zip(bounds[:-1], bounds[1:], strict=True)
        ]
        ends = sides_of_rows.offsets.to_numpy().tolist()
        numbers = block.column("numbers").to_pylist()
        for begin, end, its_numbers in zip(ends[:-1], ends[1:], numbers, strict=True):
            yield EncodedRow(sides[begin:end], its_numbers)


def teaches(sides: Sequence[LMRow]) -> bool:
    """Return whether every side has a token in the loss, and the others differ from the first."""
    first, *others = sides
    has_loss = all(side.in_loss[1:].any() for side in sides)
    return has_loss and not any(np.array_equal(first.ids, side.ids) for side in others)


def stop_tokens(tokenizer: Any, path: str) -> list[int]:
    """Return the tokens that end a sample of the model in that folder."""
    return [id for id in (tokenizer.eos_token_id, *generation_eos(path)) if id is not None]


def without_blanks(side: LMRow, stops: Sequence[int], tokenizer: Any) -> LMRow:
    """Return the side up to its last stop token, if only blanks follow."""
    if side.ids[-1] in stops:
        return side
    is_reply = np.arange(len(side.ids)) >= side.in_loss.argmax()
    places = (np.isin(side.ids, stops) & is_reply).nonzero()[0]
    if not len(places) or tokenizer.decode(side.ids[places[-1] + 1 :]).strip():
        return side
    return side.cut(int(places[-1]) + 1)


def cut_rows(
    key: str, kind: str, rows: Sequence[EncodedRow], num_bad: int, max_length: int, lost: str
) -> tuple[list[EncodedRow], str]:
    """Return rows with sides of at most `max_length` tokens, and the counts in words.

    A row that then has nothing to learn from is dropped; `lost` names what it lacks. The words call
    the rows `kind`.
    """
    good: list[EncodedRow] = []
    num_cut = 0
    for row in rows:
        if max(len(side.ids) for side in row.sides) > max_length:
            num_cut += 1
            row = row._replace(sides=[side.cut(max_length) for side in row.sides])
        if teaches(row.sides):
            good.append(row)
    skipped = f", {num_bad} bad ones skipped" if num_bad else ""
    return good, (
        f"{key} holds {len(rows) + num_bad} {kind}{skipped}; {num_cut} were cut to {max_length} "
        f"tokens, and of these {len(rows) - len(good)} dropped, since nothing was left of {lost}"
    )
