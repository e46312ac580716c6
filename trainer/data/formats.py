"""Read the rows of one file in Parquet, CSV or JSON Lines format.

Each row is yielded with its place. For a row that cannot be read, a ValueError is yielded instead,
and reading continues after it if the format allows.

Data sets of the Hugging Face Hub are loaded by name, with the library `datasets`:

    hub://openai/gsm8k/main:train       organization/name, a configuration or folder, a split
    Dahoas/rm-static:test               `hub://` is optional unless there is a folder `Dahoas`

Importing that library takes a second. Local files therefore have their own readers, which also
report the place of a bad row and never guess a column's type.
"""

from __future__ import annotations

import csv
import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from verl_like.files import parse_json

SCHEME = "hub://"
NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<folder>(/[\w.-]+)*)(:(?P<split>[\w.-]+))?")
FILE_ENDINGS = (".parquet", ".csv", ".json", ".jsonl", ".gz")
NOT_CONFIGURED = re.compile("BuilderConfig .* not found")
NOT_CACHED = "Couldn't find cache"
"""Words of the library's error if the data set or its cache lacks the configuration."""
PARQUET_OF_THE_HUB = "refs/convert/parquet"
"""Branch with the Hub's conversion to Parquet, for data sets that need a loading script."""


def is_hub_name(name: str) -> bool:
    """Return whether `name` means a data set of the Hub, not a file in an existing folder."""
    if name.startswith(SCHEME):
        return True
    is_file = name.endswith(FILE_ENDINGS) or Path(name).expanduser().parent.exists()
    return not is_file and NAME.fullmatch(name) is not None


def load_hub_split(name: str, key: str) -> Any:
    """Return the split with this name as a `datasets.Dataset`; errors mention `key`.

    The library caches downloads, so later starts need no network.
    """
    match = NAME.fullmatch(name.removeprefix(SCHEME))
    if match is None:
        raise ConfigError(
            f"{key}={name} is not the name of a data set. Write {SCHEME}organization/name, then "
            "/folder and :split if the data set has several."
        )
    try:
        loaded = _load(match["name"], match["folder"].strip("/") or None, match["split"])
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{key}={name}: it is not a file here, and the Hugging Face hub does not "
            f"provide it: {reason}"
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    if len(loaded) > 1:
        raise ConfigError(
            f"{key}={name}: the data set has several splits. Append :SPLIT, where "
            f"SPLIT is one of {', '.join(loaded)}."
        )
    return next(iter(loaded.values()))


def _load(name: str, folder: str | None, split: str | None) -> Any:
    """Load the split; `folder` is the name of a configuration, or of a folder with files."""
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    place: dict[str, Any] = {"path": name, "data_dir": folder, "split": split}
    try:
        return load_dataset(name, folder, split=split)
    except RuntimeError:  # the data set needs a loading script
        place["revision"] = PARQUET_OF_THE_HUB
    except (ConnectionError, ValueError) as error:
        if isinstance(error, ConnectionError) or NOT_CACHED in str(error):
            place["path"] = snapshot_download(name, repo_type="dataset", local_files_only=True)
        elif folder is None or not NOT_CONFIGURED.search(str(error)):
            raise
    return load_dataset(**place)


Placed = Iterator[tuple[str, Any]]
"""Yields (place, row or ValueError)."""
CheckColumns = Callable[[Sequence[str]], None]
"""Raises an error if the table lacks a column."""
NO_UTF8 = re.compile("[\udc80-\udcff]")
"""Matches bytes that are not UTF-8, as read with `errors="surrogateescape"`."""
FORMATS = "files other than .parquet and .csv need a JSON object per line"
BYTES_AT_ONCE = 8 * 2**20
"""Size of the rows of a Parquet file that are read at once."""
BROKEN_GZIP = (OSError, EOFError, zlib.error)


def parquet_rows(path: Path, check_columns: CheckColumns) -> Placed:
    """Yield every row of the table, of which about `BYTES_AT_ONCE` are in memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # by default, pyarrow reads all bytes of a row group, which may be those of all images
        table = pq.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
    except (pa.ArrowException, OSError) as err:
        raise ConfigError(f"{path} is not a readable parquet file: {err}") from err

    with table:
        check_columns(table.schema_arrow.names)
        end, memory = 0, pa.default_memory_pool()
        for number in range(table.num_row_groups):
            group = table.metadata.row_group(number)
            index, end = end, end + group.num_rows
            at_once = max(1, group.num_rows * BYTES_AT_ONCE // max(group.total_byte_size, 1))
            try:
                for batch in table.iter_batches(min(at_once, 2**16), row_groups=[number]):
                    for row in _rows_of_batch(batch):
                        yield f"{path}, row {index}", row
                        index += 1
                    del batch
                    memory.release_unused()
            except (pa.ArrowException, OSError) as err:
                why = str(err).splitlines()[0]
                yield (
                    f"{path}, rows {index} to {end - 1}",
                    ValueError(f"these rows of the file are not readable: {why}"),
                )
    memory.release_unused()


def _rows_of_batch(batch: Any) -> list[Any]:
    """Return the rows, with a ValueError instead of a row that cannot be read."""
    try:
        rows: list[Any] = batch.to_pylist()
    except (ValueError, OverflowError) as err:  # text that is not UTF-8, or an invalid time
        if batch.num_rows == 1:
            return [ValueError(f"not readable: {err}")]
        singles = (batch.slice(index, 1) for index in range(batch.num_rows))
        rows = [row for single in singles for row in _rows_of_batch(single)]
    return rows


def csv_rows(path: Path, check_columns: CheckColumns) -> Placed:
    """Yield every row, or an error for an invalid one; cells are strings, or None if empty."""
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
                where = f"{path}, line {reader.line_num + 1}"  # the rejected line
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
    """Yield the JSON value of every line that is not empty."""
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
        return parse_json(line)
    except UnicodeDecodeError as err:
        return ValueError(f"not UTF-8 ({err}); {FORMATS}")
    except ValueError as err:
        reason = str(err)
        if isinstance(err, JSONDecodeError):
            reason = f"{err.msg.removesuffix(' at')} at character {err.pos + 1}"
        return ValueError(f"not JSON ({reason}); {FORMATS}")
