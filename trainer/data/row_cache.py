"""A cache of tokenized rows on disk: large files are read and tokenized once.

Later runs with the same files, tokenizer and settings memory-map the result, so the driver's memory
hardly grows with the files.

    entry = cached_rows("prompts", key, {"row": pa.string(), ...}, read, summary)
    entry.table.column("row")[7]

An entry is the folder `<kind>/<key>` with `rows.arrow` and `summary.json`.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from verl_like.files import cache_folder

if TYPE_CHECKING:
    from workers.images import ImageRef

logger = logging.getLogger(__name__)
ROWS_PER_BLOCK = 1000
"""Rows in memory while an entry is written."""
FORGOTTEN_AFTER_S = 30 * 24 * 3600.0
"""A new entry removes entries of its kind that no run has opened for this long."""
ROWS, SUMMARY = "rows.arrow", "summary.json"


class NotPlainError(Exception):
    """Raised for a value in a row that a cache entry cannot store."""


class Entry(NamedTuple):
    """A cache entry: rows in a memory-mapped Arrow file, and a summary of all rows."""

    folder: Path
    table: Any
    summary: dict[str, Any]


def cached_rows(
    kind: str,
    key: str,
    columns: dict[str, Any],
    read: Callable[[], Iterator[dict[str, Any] | None]],
    summary: Callable[[], dict[str, Any]] = dict,
) -> Entry | None:
    """Return the cached entry with that key; on a miss, read the rows and write the entry.

    `columns` maps names to Arrow types. `read` yields the values of every row, or None for a bad
    row. `summary` is called after the last row and returns numbers about all rows, which are stored
    with "num_bad". Return None if the rows cannot be cached, or if no folder can hold the cache.
    """
    cache = cache_folder(kind)
    entry = _open(cache / key)
    if entry is not None:
        return entry
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        for old in cache.iterdir():
            with suppress(OSError):  # another run removes it as well
                if time.time() - old.stat().st_mtime > FORGOTTEN_AFTER_S:
                    shutil.rmtree(old)
        unfinished = Path(tempfile.mkdtemp(dir=cache, prefix="unfinished_"))
        try:
            num_bad = _write(unfinished / ROWS, columns, read())
            totals = {"num_bad": num_bad, **summary()}
            (unfinished / SUMMARY).write_text(json.dumps(totals), encoding="utf-8")
            shutil.rmtree(cache / key, ignore_errors=True)
            with suppress(OSError):  # another run was faster
                unfinished.rename(cache / key)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except NotPlainError as error:
        logger.info("%s are not cached, so they are tokenized at every start: %s", kind, error)
        return None
    except OSError as error:
        logger.warning(
            "%s are tokenized at every start, because no cache can be written to %s (%s)",
            kind,
            cache,
            error,
        )
        return None
    return _open(cache / key)


def _write(path: Path, columns: dict[str, Any], rows: Iterator[dict[str, Any] | None]) -> int:
    """Write the good rows block by block; return the number of bad ones."""
    import pyarrow as pa

    schema, num_bad = pa.schema(list(columns.items())), 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as out:
        while block := list(islice(rows, ROWS_PER_BLOCK)):
            good = [row for row in block if row is not None]
            num_bad += len(block) - len(good)
            out.write_batch(pa.RecordBatch.from_pylist(good, schema=schema))
    return num_bad


def _open(folder: Path) -> Entry | None:
    import pyarrow as pa

    if not folder.is_dir():
        return None
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
        table = pa.ipc.open_file(pa.memory_map(str(folder / ROWS))).read_all()
        with suppress(OSError):  # the folder belongs to another user
            os.utime(folder)
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        logger.warning("%s is damaged and written again (%s)", folder, error)
        return None
    return Entry(folder, table, summary)


def check_cacheable(refs: Sequence[ImageRef]) -> None:
    """Raise an error if an image is a file of the user, which may change."""
    if any(Path(ref[0]).parent != cache_folder("images") for ref in refs):
        raise NotPlainError("their images are files, which may change")
