"""Tokenized prompts by row number: in memory, or those of large files in a cache on disk.

Large files are read and tokenized once; later runs map the result into memory, which does not grow
with the files. An entry of the cache (`trainer.data.cache`):

    rows.arrow     the rows as JSON, and their tokens, `ROWS_PER_BLOCK` to a block
    lengths.int32  how many tokens every prompt has
    sources.int32  the number of every row's data_source in facts.json
    facts.json     what was counted on the way
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from trainer.data import cache
from trainer.data.cache import NotPlainError, cached, what_tokens_depend_on
from trainer.data.config import DataConfig
from trainer.data.files import Row, good_rows, is_plain, names_of, other_columns
from trainer.data.prompt_tokens import encode_prompt
from verl_like.files import write_whole

logger = logging.getLogger(__name__)
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
        """Computed once, and read by later runs; where the entry is gone, by every run."""
        path = self._folder / f"{hashlib.sha256(what.encode()).hexdigest()}.txt"
        with suppress(OSError):
            return path.read_text(encoding="utf-8")
        text = compute()
        try:
            write_whole(path, text)
        except OSError as error:
            logger.warning("%s is not kept for later runs: %s", path, error)
        return text

    def _cell(self, column: str, number: int) -> Any:
        block, place = divmod(int(number), cache.ROWS_PER_BLOCK)
        return self._blocks.get_batch(block).column(column)[place]


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

    names = getattr(config, setting)
    paths = names_of(names)
    depends_on = None if config.custom_cls.path else what_tokens_depend_on(paths, tokenizer)
    found = None
    if depends_on is not None:
        depends_on |= {"prompt_key": config.prompt_key, "needs_rules": needs_rules}
        depends_on |= {"on_bad_row": config.on_bad_row}
        found = cached_prompts(depends_on, read, config.prompt_key)
    if found is None:
        return PromptsInMemory(read(), config.prompt_key)
    if len(found.lengths):
        longest = int(np.argmax(found.lengths))
        check(f"data.{setting}, row {longest}", int(found.lengths[longest]))
    return found


def cached_prompts(
    depends_on: dict[str, Any], read: Callable[[], Iterator[Encoded | None]], prompt_key: str
) -> CachedPrompts | None:
    """The entry for all that it `depends_on`; `read` gives the rows, None for a bad one."""
    return cached(
        "prompts", depends_on, lambda folder: _write(folder, read(), prompt_key), CachedPrompts
    )


def _write(folder: Path, encoded: Iterator[Encoded | None], prompt_key: str) -> None:
    """An entry, block by block: no more than one is in memory."""
    import pyarrow as pa

    schema = pa.schema([("row", pa.string()), ("tokens", pa.list_(pa.int32()))])
    counted = _Counted(prompt_key)
    good = counted.good(encoded)
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as file, pa.ipc.new_file(file, schema) as out:
        while block := list(islice(good, cache.ROWS_PER_BLOCK)):
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
