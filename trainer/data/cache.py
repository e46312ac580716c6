"""Tokens of large files, written to disk once and mapped into memory by later runs.

    key = cache_key(files, tokenizer, prompt_key="prompt")
    entry = cached_rows("prompts", key, {"row": pa.string(), ...}, read, facts)
    entry.table.column("row")[7]

An entry is the folder `<kind>/<key>` with `rows.arrow` and `facts.json`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)
CACHED_FROM_BYTES = 64 * 2**20
"""Smaller files are read at every start."""
ROWS_PER_BLOCK = 1000
"""Rows in memory while an entry is written."""
FORGOTTEN_AFTER_S = 30 * 24 * 3600.0
"""An entry that no run has opened for so long is removed."""
FORMAT = 4
ROWS, FACTS = "rows.arrow", "facts.json"


class NotPlainError(Exception):
    """A row has a value that an entry cannot represent."""


class Entry(NamedTuple):
    """Rows in an Arrow file that is mapped into memory, and facts about all of them."""

    folder: Path
    table: Any
    facts: dict[str, Any]


def cache_key(files: Sequence[str], tokenizer: Any, **settings: Any) -> str | None:
    """Hash all that the tokens depend on; None if these files are not cached."""
    paths = [Path(name) for name in files]
    if not all(path.is_file() for path in paths):
        return None  # on the hub; or missing, which the reader reports
    if sum(path.stat().st_size for path in paths) < CACHED_FROM_BYTES:
        return None
    tokens = facts_of_tokenizer(tokenizer)
    if tokens is None:
        return None
    depends_on = {"format": FORMAT, "files": facts_of_files(paths), "tokenizer": tokens, **settings}
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


def cached_rows(
    kind: str,
    key: str,
    columns: dict[str, Any],
    read: Callable[[], Iterator[dict[str, Any] | None]],
    facts: Callable[[], dict[str, Any]] = dict,
) -> Entry | None:
    """Return the entry with that key; write it first if there is none.

    `columns` are names and Arrow types. `read` yields the values of every row, None for a bad row.
    `facts` is called after the last row and returns facts about all rows, in addition to "num_bad".
    The result is None if the rows cannot be cached, or if there is no place for a cache.
    """
    cache = cache_folder(kind)
    entry = _open(cache / key)
    if entry is not None:
        return entry
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        _remove_old(cache)
        unfinished = Path(tempfile.mkdtemp(dir=cache, prefix="unfinished_"))
        try:
            num_bad = _write(unfinished / ROWS, columns, read())
            all_facts = {"num_bad": num_bad, **facts()}
            (unfinished / FACTS).write_text(json.dumps(all_facts), encoding="utf-8")
            shutil.rmtree(cache / key, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run was first
                unfinished.rename(cache / key)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except NotPlainError as error:
        logger.info("%s are tokenized at every start: %s", kind, error)
        return None
    except OSError as error:
        logger.warning("%s are tokenized at every start: no cache in %s (%s)", kind, cache, error)
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
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        table = pa.ipc.open_file(pa.memory_map(str(folder / ROWS))).read_all()
        with contextlib.suppress(OSError):  # it belongs to another user
            os.utime(folder)
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        logger.warning("%s is damaged and written again (%s)", folder, error)
        return None
    return Entry(folder, table, facts)


def _remove_old(cache: Path) -> None:
    for entry in cache.iterdir():
        with contextlib.suppress(OSError):  # another run removes it, too
            if time.time() - entry.stat().st_mtime > FORGOTTEN_AFTER_S:
                shutil.rmtree(entry)


def cache_folder(kind: str) -> Path:
    """Return `$XDG_CACHE_HOME/verl_like/<kind>`, by default in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "verl_like" / kind


def facts_of_files(paths: Iterable[Path]) -> list[list[Any]]:
    """Return each file's path, size and time of the last change."""
    stats = [(path.resolve(), path.stat()) for path in paths]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in stats]


def facts_of_tokenizer(tokenizer: Any) -> dict[str, Any] | None:
    """Return what the tokens depend on; None if the tokenizer cannot be serialized."""
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    return {
        "class": type(tokenizer).__qualname__,
        "version": transformers.__version__,
        "tokenizer": hashlib.sha256(backend.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
    }
