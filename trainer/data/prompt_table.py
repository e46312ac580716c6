"""Tokenized prompts by row number: in memory, or those of large files in a cache on disk.

`trainer.data.prompts.PromptSet` calls `read_prompts`. Files of `CACHED_FROM_BYTES` and more are
read and tokenized once; later runs map the result into memory, which does not grow with the files.
An entry of the cache is a folder, whose name is a hash of all that its content depends on:

    rows.arrow     the rows as JSON, and their tokens, `ROWS_PER_BLOCK` to a block
    lengths.int32  how many tokens every prompt has
    sources.int32  the number of every row's data_source in facts.json
    facts.json     what was counted on the way
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
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.data.config import DataConfig
from trainer.data.files import Row, are_first_rows_enough, good_rows, is_plain, other_columns
from trainer.data.prompt_tokens import encode_prompt
from verl_like.files import write_whole

logger = logging.getLogger(__name__)
CACHED_FROM_BYTES = 64 * 2**20
ROWS_PER_BLOCK = 1000
FORGOTTEN_AFTER_S = 30 * 24 * 3600.0
"""An entry that no run has opened for so long is removed."""
FORMAT = 1
Encoded = tuple[Row, NDArray[np.int64]]
"""A row, and the tokens of its prompt."""
CheckLength = Callable[[str, int], None]
"""(where a prompt stands, its tokens): refuses one that is too long."""


class PromptTable(Protocol):
    """Rows and tokens by number."""

    num_bad: int
    """Rows of the files that were left out, and have no number."""
    lengths: NDArray[np.int32]
    """How many tokens every prompt has, before any cut."""

    def row(self, number: int) -> Row:
        """A row as its file has it."""

    def tokens(self, number: int) -> NDArray[np.int64]:
        """Those of its prompt."""

    def first_of_sources(self, kept: NDArray[np.int64]) -> dict[str, int]:
        """Every data_source of these rows, and the first of its rows."""

    def columns(self, kept: NDArray[np.int64]) -> list[str]:
        """Columns of plain values beside those of verl's schema, of these rows."""

    def remembered(self, what: str, compute: Callable[[], str]) -> str:
        """A text that follows from the rows, and from what its name says."""


class PromptsInMemory:
    """All rows and tokens in the driver."""

    def __init__(self, encoded: Iterable[Encoded | None], prompt_key: str) -> None:
        """Read all; None for a bad row."""
        found = list(encoded)
        self._rows = [one for one in found if one is not None]
        self.num_bad = len(found) - len(self._rows)
        self._prompt_key = prompt_key
        self.lengths = np.array([len(tokens) for _, tokens in self._rows], dtype=np.int32)

    def row(self, number: int) -> Row:
        """A row as its file has it."""
        return self._rows[number][0]

    def tokens(self, number: int) -> NDArray[np.int64]:
        """Those of its prompt."""
        return self._rows[number][1]

    def first_of_sources(self, kept: NDArray[np.int64]) -> dict[str, int]:
        """Every data_source of these rows, and the first of its rows."""
        first: dict[str, int] = {}
        for number in kept.tolist():
            first.setdefault(str(self.row(number)["data_source"]), number)
        return first

    def columns(self, kept: NDArray[np.int64]) -> list[str]:
        """Columns of plain values beside those of verl's schema, of these rows."""
        return other_columns((self.row(number) for number in kept), self._prompt_key)

    def remembered(self, what: str, compute: Callable[[], str]) -> str:
        """Computed in every run."""
        return compute()


class CachedPrompts:
    """Rows and tokens in an entry of the cache."""

    def __init__(self, folder: Path) -> None:
        """Map it into memory; raises where it is no whole entry."""
        import pyarrow as pa

        self._folder = folder
        facts = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        self.num_bad: int = facts["num_bad"]
        self._columns: list[str] = facts["columns"]
        self._source_names: list[str] = facts["data_sources"]
        self._sources = np.fromfile(folder / "sources.int32", np.int32)
        self.lengths = np.fromfile(folder / "lengths.int32", np.int32)
        self._blocks = pa.ipc.open_file(pa.memory_map(str(folder / "rows.arrow")))
        if len(self.lengths) != facts["num_rows"] or len(self._sources) != facts["num_rows"]:
            raise ValueError(f"{folder} is not whole")

    def row(self, number: int) -> Row:
        """A row as its file has it."""
        row: Row = json.loads(self._cell("row", number).as_py())
        return row

    def tokens(self, number: int) -> NDArray[np.int64]:
        """Those of its prompt."""
        found: NDArray[np.int64] = self._cell("tokens", number).values.to_numpy().astype(np.int64)
        return found

    def first_of_sources(self, kept: NDArray[np.int64]) -> dict[str, int]:
        """Every data_source of these rows, and the first of its rows."""
        codes, places = np.unique(self._sources[kept], return_index=True)
        first = {int(kept[place]): int(code) for place, code in zip(places, codes, strict=True)}
        return {self._source_names[first[number]]: number for number in sorted(first)}

    def columns(self, kept: NDArray[np.int64]) -> list[str]:
        """Columns of plain values beside those of verl's schema, of all rows."""
        return list(self._columns)

    def remembered(self, what: str, compute: Callable[[], str]) -> str:
        """Computed once; later runs read it."""
        path = self._folder / f"{hashlib.sha256(what.encode()).hexdigest()}.txt"
        if path.is_file():
            return path.read_text(encoding="utf-8")
        text = compute()
        write_whole(path, text)
        return text

    def _cell(self, column: str, number: int) -> Any:
        block, place = divmod(int(number), ROWS_PER_BLOCK)
        return self._blocks.get_batch(block).column(column)[place]


class NotPlainError(Exception):
    """A row has a value that JSON has no form for."""


def read_prompts(
    config: DataConfig, setting: str, tokenizer: Any, needs_rules: bool, check: CheckLength
) -> PromptTable:
    """The good rows of the files that the key `setting` of `config` names."""

    def read() -> Iterator[Encoded | None]:
        tokens: list[NDArray[np.int64]] = []

        def encode(where: str, row: Row) -> None:
            tokens[:] = [encode_prompt(row[config.prompt_key], tokenizer)]
            check(where, len(tokens[0]))

        for row in good_rows(config, setting, tokenizer, needs_rules, encode):
            yield None if row is None else (row, tokens[0])

    depends_on = _what_it_depends_on(config, setting, tokenizer, needs_rules)
    cached = depends_on and cached_prompts(depends_on, read, config.prompt_key)
    if not cached:
        return PromptsInMemory(read(), config.prompt_key)
    if len(cached.lengths):
        longest = int(np.argmax(cached.lengths))
        check(f"data.{setting}, row {longest}", int(cached.lengths[longest]))
    return cached


def _what_it_depends_on(
    config: DataConfig, setting: str, tokenizer: Any, needs_rules: bool
) -> dict[str, Any] | None:
    """What an entry of the cache depends on; None where there is to be none."""
    names = getattr(config, setting)
    paths = [Path(name) for name in ([names] if isinstance(names, str) else names)]
    is_small = sum(path.stat().st_size for path in paths if path.is_file()) < CACHED_FROM_BYTES
    facts = facts_of_tokenizer(tokenizer)
    if is_small or facts is None or config.custom_cls.path or are_first_rows_enough():
        return None
    if not all(path.is_file() for path in paths):  # of the hub; or missing, which reading says
        return None
    return {
        "format": FORMAT,
        "files": facts_of_files(paths),
        "tokenizer": facts,
        "prompt_key": config.prompt_key,
        "needs_rules": needs_rules,
        "on_bad_row": config.on_bad_row,
    }


def cached_prompts(
    depends_on: dict[str, Any], read: Callable[[], Iterator[Encoded | None]], prompt_key: str
) -> CachedPrompts | None:
    """The entry for all that it `depends_on`, made where there is none.

    `read` gives the rows, None for a bad one. None: rows like these cannot be kept as JSON, or
    there is no place for a cache.
    """
    key = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    cache = cache_folder()
    entry = cache / key
    if (found := _opened(entry)) is not None:
        return found
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        _forget_old(cache)
        made = Path(tempfile.mkdtemp(dir=cache, prefix="being_made_"))
        try:
            _write(made, read(), prompt_key)
            shutil.rmtree(entry, ignore_errors=True)
            with contextlib.suppress(OSError):  # another run was first
                made.rename(entry)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except NotPlainError as error:
        logger.info("prompts are tokenized at every start: %s", error)
        return None
    except OSError as error:
        logger.warning("prompts are tokenized at every start: no cache in %s (%s)", cache, error)
        return None
    return _opened(entry)


def cache_folder() -> Path:
    """Where entries are: `$XDG_CACHE_HOME/verl_like/prompts`, as a rule in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "verl_like" / "prompts"


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


def _opened(entry: Path) -> CachedPrompts | None:
    import pyarrow as pa

    if not entry.is_dir():
        return None
    try:
        found = CachedPrompts(entry)
        os.utime(entry)
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid) as error:
        logger.warning("%s is damaged and made again (%s)", entry, error)
        return None
    return found


def _forget_old(cache: Path) -> None:
    for entry in cache.iterdir():
        with contextlib.suppress(OSError):  # another run removes it, too
            if time.time() - entry.stat().st_mtime > FORGOTTEN_AFTER_S:
                shutil.rmtree(entry)


def _write(folder: Path, encoded: Iterator[Encoded | None], prompt_key: str) -> None:
    """An entry, block by block: no more than one is in memory."""
    import pyarrow as pa

    schema = pa.schema([("row", pa.string()), ("tokens", pa.list_(pa.int32()))])
    counted = _Counted(prompt_key)
    good = counted.good(encoded)
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as out:
        while block := list(islice(good, ROWS_PER_BLOCK)):
            counted.add(block)
            texts = pa.array([json.dumps(row) for row, _ in block])
            tokens = pa.array([tokens for _, tokens in block], schema.field("tokens").type)
            out.write_batch(pa.record_batch([texts, tokens], schema=schema))

    np.array(counted.lengths, dtype=np.int32).tofile(folder / "lengths.int32")
    np.array(counted.sources, dtype=np.int32).tofile(folder / "sources.int32")
    (folder / "facts.json").write_text(json.dumps(counted.facts()), encoding="utf-8")


class _Counted:
    """What is known of all rows when the last one has been read."""

    def __init__(self, prompt_key: str) -> None:
        self._prompt_key = prompt_key
        self.num_bad = 0
        self.lengths: list[int] = []
        self.sources: list[int] = []
        self._source_codes: dict[str, int] = {}
        self._columns: set[str] = set()

    def good(self, encoded: Iterable[Encoded | None]) -> Iterator[Encoded]:
        """The good rows; refuses one that JSON has no form for."""
        for one in encoded:
            if one is None:
                self.num_bad += 1
                continue
            for name, value in one[0].items():
                if not is_plain(value):
                    raise NotPlainError(f"column {name!r} has values of {type(value).__name__}")
            yield one

    def add(self, block: Sequence[Encoded]) -> None:
        """Good rows, with the tokens of their prompts."""
        rows = [row for row, _ in block]
        self.lengths += [len(tokens) for _, tokens in block]
        self._columns.update(other_columns(rows, self._prompt_key))
        for row in rows:
            name = str(row["data_source"])
            code = self._source_codes.setdefault(name, len(self._source_codes))
            self.sources.append(code)

    def facts(self) -> dict[str, Any]:
        """For `facts.json`."""
        return {
            "num_rows": len(self.lengths),
            "num_bad": self.num_bad,
            "columns": sorted(self._columns),
            "data_sources": list(self._source_codes),
        }
