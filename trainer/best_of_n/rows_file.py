"""Rows in parquet and JSONL files that appear whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_like.files import json_lines, lines_of, parse_json, write_whole

Row = dict[str, Any]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write them in order: parquet, if the name ends so, else a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        write_whole(path, _parquet(rows))
    else:
        write_whole(path, json_lines(rows))


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file of `write_rows`."""
    return [parse_json(line) for line in lines_of(path)]


def _parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    contents: bytes = buffer.getvalue().to_pybytes()
    return contents
