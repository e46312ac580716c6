"""Rows of one file, by its format: parquet, CSV, JSON lines.

A row comes with its place. What cannot be read comes as a ValueError in the row's stead, and
reading goes on after it as far as the format allows: such a row is named in an error, or left out.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from verl_like.files import parse_json

Placed = Iterator[tuple[str, Any]]
"""(where it stands, row or ValueError)."""
CheckColumns = Callable[[Sequence[str]], None]
"""Refuses a table that lacks a column."""
NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Bytes that are no UTF-8, as Python's surrogateescape reads them."""
BROKEN_GZIP = (OSError, EOFError, zlib.error)
DEEPEST = 100
"""Levels of a row's lists and objects: what is deeper exhausts the stack of who reads it."""


def parquet_rows(path: Path, check_columns: CheckColumns) -> Placed:
    """Every row of the table, some in memory at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as err:
        raise ConfigError(f"{path} is not a readable parquet file: {err}") from err

    with table:
        check_columns(table.schema_arrow.names)
        end = 0
        for number in range(table.num_row_groups):
            index, end = end, end + table.metadata.row_group(number).num_rows
            try:
                for batch in table.iter_batches(row_groups=[number]):
                    for row in _rows_of_batch(batch):
                        yield f"{path}, row {index}", row
                        index += 1
            except (pa.ArrowException, OSError) as err:
                why = str(err).splitlines()[0]
                yield (
                    f"{path}, rows {index} to {end - 1}",
                    ValueError(f"their part of the file is not readable: {why}"),
                )


def _rows_of_batch(batch: Any) -> list[Any]:
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError):  # a text that is no UTF-8, or a time that is none
        rows = [_row_or_problem(batch.slice(index, 1)) for index in range(batch.num_rows)]
    return rows


def _row_or_problem(single: Any) -> Any:
    try:
        return single.to_pylist()[0]
    except (ValueError, OverflowError) as err:
        return ValueError(f"not readable: {err}")


def csv_rows(path: Path, check_columns: CheckColumns) -> Placed:
    """Every cell is a text; an empty one is nothing."""
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        reader = csv.DictReader(file)
        try:
            check_columns(reader.fieldnames or [])
        except csv.Error as err:
            raise ConfigError(f"{path}: its first line is not readable as CSV: {err}") from err
        while True:
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as err:
                where = f"{path}, line {reader.line_num + 1}"  # that which it could not take
                yield where, ValueError(f"not readable as CSV: {err}")
            else:
                yield f"{path}, line {reader.line_num}", _filled_cells(row)


def _filled_cells(row: dict[Any, Any]) -> Any:
    if None in row:
        return ValueError(f"it has more cells than the {len(row) - 1} columns")
    broken = [name for name, cell in row.items() if cell and NO_UTF8.search(cell)]
    if broken:
        return ValueError(f"column {broken[0]!r} is not UTF-8")
    return {name: cell or None for name, cell in row.items()}


def json_rows(path: Path) -> Placed:
    """A JSON value a line; empty lines are passed over."""
    opened: Any = gzip.open(path) if path.suffix == ".gz" else path.open("rb")
    number = 0
    with opened as file:
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{path}, line {number}", _json_row(line)
        except BROKEN_GZIP as err:
            yield f"{path}, line {number + 1}", ValueError(f"not readable from here on: {err}")


def _json_row(line: bytes) -> Any:
    try:
        row = parse_json(line)
    except UnicodeDecodeError as err:
        return ValueError(f"not UTF-8 ({err})")
    except ValueError as err:
        return ValueError(
            f"not JSON ({err}); a file that ends in neither .parquet nor .csv has a JSON object a "
            "line"
        )
    if line.count(b"{") + line.count(b"[") > DEEPEST and _depth(row) > DEEPEST:
        return ValueError(f"nested more than {DEEPEST} levels deep")
    if isinstance(row, dict) and (name := _named_twice(line, row)) is not None:
        return ValueError(f"two of its columns have the name {name!r}")
    return row


def _named_twice(line: bytes, row: dict[str, Any]) -> str | None:
    """The name that two columns have, if one is; few lines are parsed for it again."""
    names = (json.dumps(name, ensure_ascii=False).encode(errors="replace") for name in row)
    if all(line.count(name) < 2 for name in names):
        return None
    pairs: list[tuple[str, Any]] = json.loads(line, object_pairs_hook=list)
    seen = Counter(name for name, _ in pairs)
    return next((name for name, count in seen.items() if count > 1), None)


def _depth(value: Any) -> int:
    """Levels of lists and objects within each other."""
    levels, inner = 0, [value]
    while inner := [one for one in inner if isinstance(one, dict | list) and one]:
        levels += 1
        inner = [part for one in inner for part in (one.values() if isinstance(one, dict) else one)]
    return levels
