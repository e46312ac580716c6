"""What is made of large files once, in entries on disk that later runs map into memory.

    entry = cached_rows("prompts", depends_on, {"row": pa.string(), ...}, read, facts)
    entry.table.column("row")[7]

An entry is a folder, whose name is a hash of all that its content depends on: `rows.arrow` and
`facts.json`.
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
from typing import Any

from trainer.data.files import are_first_rows_enough

logger = logging.getLogger(__name__)
CACHED_FROM_BYTES = 64 * 2**20
"""Files that are smaller together are read at every start."""
ROWS_PER_BLOCK = 1000
"""Of the files in an entry: no more rows than these are in memory while they are written."""
FORGOTTEN_AFTER_S = 30 * 24 * 3600.0
"""An entry that no run has opened for so long is removed."""
FORMAT = 4
ROWS, FACTS = "rows.arrow", "facts.json"


class NotPlainError(Exception):
    """A row has a value that an entry has no form for."""


class Entry:
    """Rows in an Arrow file that is mapped into memory, and facts about all of them."""

    def __init__(self, folder: Path) -> None:
        """Raises where the entry is not whole."""
        import pyarrow as pa

        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        self.table = pa.ipc.open_file(pa.memory_map(str(folder / ROWS))).read_all()


def what_tokens_depend_on(names: Sequence[str], tokenizer: Any) -> dict[str, Any] | None:
    """Files and tokenizer, for `cached_rows`; None where there is to be no entry."""
    paths = [Path(name) for name in names]
    if are_first_rows_enough() or not all(path.is_file() for path in paths):
        return None  # of the hub; or missing, which reading says
    is_small = sum(path.stat().st_size for path in paths) < CACHED_FROM_BYTES
    facts = None if is_small else facts_of_tokenizer(tokenizer)
    if facts is None:
        return None
    return {"format": FORMAT, "files": facts_of_files(paths), "tokenizer": facts}


def cached_rows(
    what: str,
    depends_on: dict[str, Any],
    columns: dict[str, Any],
    read: Callable[[], Iterator[dict[str, Any] | None]],
    facts: Callable[[], dict[str, Any]] = dict,
) -> Entry | None:
    """The entry for all that it `depends_on`, made where there is none.

    `columns` are names and Arrow types, `read` gives every row's values, None for a bad row, and
    `facts`, asked after the last row, what is known of all of them beside "num_bad". None: rows
    like these cannot be kept, or there is no place for a cache.
    """
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    cache = cache_folder(what)
    entry = cache / key
    if (found := _opened(entry)) is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_old(cache)
        made = Path(tempfile.mkdtemp(dir=cache, prefix="being_made_"))
        try:
            num_bad = _write(made / ROWS, columns, read())
            all_facts = {"num_bad": num_bad, **facts()}
            (made / FACTS).write_text(json.dumps(all_facts), encoding="utf-8")
            shutil.rmtree(entry, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run was first
                made.rename(entry)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except NotPlainError as error:
        logger.info("%s are tokenized at every start: %s", what, error)
        return None
    except OSError as error:
        logger.warning("%s are tokenized at every start: no cache in %s (%s)", what, cache, error)
        return None
    return _opened(entry)


def _write(path: Path, columns: dict[str, Any], rows: Iterator[dict[str, Any] | None]) -> int:
    """Write the good rows, of which no more than a block is in memory; the number of bad ones."""
    import pyarrow as pa

    schema, num_bad = pa.schema(list(columns.items())), 0
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as out:
        while block := list(islice(rows, ROWS_PER_BLOCK)):
            good = [row for row in block if row is not None]
            num_bad += len(block) - len(good)
            out.write_batch(pa.RecordBatch.from_pylist(good, schema=schema))
    return num_bad


def cache_folder(what: str) -> Path:
    """Where such entries are: `$XDG_CACHE_HOME/verl_like/<what>`, as a rule in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "verl_like" / what


def facts_of_files(paths: Iterable[Path]) -> list[list[Any]]:
    """What tells a file from one with other content: path, size, time of the last change."""
    found = [(path.resolve(), path.stat()) for path in paths]
    return [[str(path), stat.st_size, stat.st_mtime_ns] for path, stat in found]


def facts_of_tokenizer(tokenizer: Any) -> dict[str, Any] | None:
    """What its tokens depend on; None of one that cannot say."""
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


def _opened(folder: Path) -> Entry | None:
    import pyarrow as pa

    if not folder.is_dir():
        return None
    try:
        entry = Entry(folder)
        with contextlib.suppress(OSError):  # of another user, who keeps it
            os.utime(folder)
    except (OSError, ValueError, pa.ArrowInvalid) as error:
        logger.warning("%s is damaged and made again (%s)", folder, error)
        return None
    return entry


def _forget_old(cache: Path) -> None:
    for entry in cache.iterdir():
        with contextlib.suppress(OSError):  # another run removes it, too
            if time.time() - entry.stat().st_mtime > FORGOTTEN_AFTER_S:
                shutil.rmtree(entry)
