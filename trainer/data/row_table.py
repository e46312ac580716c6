"""Encoded rows of large files, in the cache on disk (`trainer.data.cache`).

An entry:

    rows.arrow  tokens and loss mask of every row's sides, one after the other, and its facts
    facts.json  how many rows there are, and how many bad ones were left out

Later runs read rows whose arrays are views of the file, which is mapped into memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainer.data import cache
from trainer.data.cache import cached
from trainer.data.files import Row

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


def cached_rows(
    kind: RowKind[T], depends_on: dict[str, Any], read: Callable[[], Iterator[T | None]]
) -> tuple[list[T], int] | None:
    """The rows for all that they depend on, and how many bad ones there were.

    `read` gives the rows, None for a bad one. None: there is no place for a cache.
    """
    return cached(
        "rows",
        depends_on,
        lambda folder: _write(folder, kind, read()),
        lambda folder: _read(folder, kind),
    )


def _write(folder: Path, kind: RowKind[T], read: Iterator[T | None]) -> None:
    """An entry, block by block: no more than one is in memory."""
    import pyarrow as pa

    schema = pa.schema(
        [
            ("lengths", pa.list_(pa.int32())),
            ("ids", pa.list_(pa.int64())),
            ("in_loss", pa.list_(pa.uint8())),
            ("facts", pa.list_(pa.float64())),
        ]
    )
    num_rows = num_read = 0
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as out:
        while block := list(islice(read, cache.ROWS_PER_BLOCK)):
            parts = [kind.to_parts(row) for row in block if row is not None]
            num_rows, num_read = num_rows + len(parts), num_read + len(block)
            columns = [
                [[len(ids) for ids, _ in sides] for sides, _ in parts],
                [np.concatenate([ids for ids, _ in sides]) for sides, _ in parts],
                [np.concatenate([mask for _, mask in sides]).view(np.uint8) for sides, _ in parts],
                [list(facts) for _, facts in parts],
            ]
            fields = zip(columns, schema, strict=True)
            arrays = [pa.array(column, field.type) for column, field in fields]
            out.write_batch(pa.record_batch(arrays, schema=schema))

    facts = {"num_rows": num_rows, "num_bad": num_read - num_rows}
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


def _read(folder: Path, kind: RowKind[T]) -> tuple[list[T], int]:
    """The rows of an entry; raises where it is not whole."""
    import pyarrow as pa

    facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
    blocks = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow")))
    rows: list[T] = []
    for number in range(blocks.num_record_batches):
        rows += map(kind.of_parts, _parts_of(blocks.get_batch(number)))
    if len(rows) != facts["num_rows"]:
        raise ValueError(f"{folder} is not whole")
    return rows, facts["num_bad"]


def _parts_of(block: Any) -> Iterator[Parts]:
    ids = block.column("ids").values.to_numpy()
    in_loss = block.column("in_loss").values.to_numpy().view(np.bool_)
    begin = 0
    lengths, facts = block.column("lengths").to_pylist(), block.column("facts").to_pylist()
    for its_lengths, its_facts in zip(lengths, facts, strict=True):
        ends = np.cumsum([begin, *its_lengths]).tolist()
        pairs = zip(ends[:-1], ends[1:], strict=True)
        yield [(ids[first:end], in_loss[first:end]) for first, end in pairs], its_facts
        begin = ends[-1]
