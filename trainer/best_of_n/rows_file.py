"""Rows in parquet and JSONL files that appear whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_like.files import json_lines, write_whole

Row = dict[str, Any]


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write them in order: parquet, if the name ends so, else a line each."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        write_whole(path, _parquet(rows))
    else:
        write_whole(path, json_lines(rows))


def read_rows(path: Path) -> list[Row]:
    """The rows of a JSONL file; a line ends with a newline, whatever else a text may hold."""
    with path.open(encoding="utf-8", newline="\n") as file:
        return [json.loads(line) for line in file]


def _parquet(rows: Sequence[Row]) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    buffer = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(list(rows)), buffer)
    contents: bytes = buffer.getvalue().to_pybytes()
    return contents
