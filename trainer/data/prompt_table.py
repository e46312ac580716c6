"""Tokenized prompts by row number: in memory, or those of large files in a cache on disk.

Large files are read and tokenized once; later runs map the result into memory, which does not grow
with the files.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data import cache
from trainer.data.cache import NotPlainError, Table, cached_table, what_tokens_depend_on
from trainer.data.config import DataConfig
from trainer.data.files import (
    Row,
    good_rows,
    names_of,
    note_plain,
    plain_columns,
    prompt_row,
    rows_of_prompts,
)
from trainer.data.prompt_tokens import encode_prompt
from verl_like.files import write_whole

logger = logging.getLogger(__name__)
Encoded = tuple[Row, NDArray[np.int64]]
"""A row, and the tokens of its prompt."""
CheckLength = Callable[[str, int], None]
"""(where a prompt stands, its tokens): refuses one that is too long."""


class PromptTable:
    """Rows and tokens by number; `table` is where they lie, unless they are in memory."""

    def __init__(
        self,
        encoded: Sequence[Encoded],
        sources: NDArray[np.int32],
        facts: dict[str, Any],
        table: Table | None = None,
    ) -> None:
        """`sources` are numbers of names in `facts`."""
        self._encoded, self._sources, self._table = encoded, sources, table
        self._source_names: list[str] = facts["data_sources"]
        self.num_bad: int = facts["num_bad"]
        """Rows of the files that were left out, and have no number."""
        self.columns: list[str] = facts["columns"]
        """Columns of plain values beside those of verl's schema."""
        if table is None:
            lengths = np.array([len(tokens) for _, tokens in encoded], dtype=np.int32)
        else:
            lengths = table.as_array(lambda block: np.diff(block.column("tokens").offsets))
        self.lengths: NDArray[np.int32] = lengths
        """How many tokens every prompt has, before any cut."""

    def row(self, number: int) -> Row:
        """A row as its file has it."""
        if self._table is None:
            return self._encoded[number][0]
        row: Row = json.loads(self._table.cell("row", number).as_py())
        return row

    def tokens(self, number: int) -> NDArray[np.int64]:
        """The tokens of its prompt."""
        if self._table is None:
            return self._encoded[number][1]
        found: NDArray[np.int64] = self._table.cell("tokens", number).values.to_numpy()
        return found.astype(np.int64)

    def first_of_sources(self, kept: NDArray[np.int64]) -> dict[str, int]:
        """Every data_source of these rows, and the first of its rows."""
        codes, places = np.unique(self._sources[kept], return_index=True)
        first = {int(kept[place]): int(code) for place, code in zip(places, codes, strict=True)}
        return {self._source_names[first[number]]: number for number in sorted(first)}

    def remembered(self, what: str, compute: Callable[[], str]) -> str:
        """A text that follows from the rows, and from what its name says; kept with the table."""
        if self._table is None:
            return compute()
        path = self._table.folder / f"{hashlib.sha256(what.encode()).hexdigest()}.txt"
        with suppress(OSError):
            return path.read_text(encoding="utf-8")
        text = compute()
        try:
            write_whole(path, text)
        except OSError as error:
            logger.warning("%s is not kept for later runs: %s", path, error)
        return text


def read_prompts(
    config: DataConfig, setting: str, tokenizer: Any, needs_rules: bool, check: CheckLength
) -> PromptTable:
    """The good rows of the files that the key `setting` of `config` names."""

    def encode(where: str, row: Row) -> Encoded:
        row = prompt_row(row, config.prompt_key, needs_rules)
        tokens = encode_prompt(row[config.prompt_key], tokenizer)
        check(where, len(tokens))
        return row, tokens

    def read() -> Iterator[Encoded | None]:
        rows = rows_of_prompts(config, setting, tokenizer, needs_rules)
        return good_rows(rows, encode, config.on_bad_row)

    paths = names_of(getattr(config, setting))
    depends_on = None if config.custom_cls.path else what_tokens_depend_on(paths, tokenizer)
    found = None
    if depends_on is not None:
        depends_on |= {"prompt_key": config.prompt_key, "needs_rules": needs_rules}
        depends_on |= {"on_bad_row": config.on_bad_row}
        found = cached_prompts(depends_on, read, config.prompt_key)
    if found is None:
        return prompts_in_memory(read(), config.prompt_key)
    if len(found.lengths):
        longest = int(np.argmax(found.lengths))
        check(f"data.{setting}, row {longest}", int(found.lengths[longest]))
    return found


def prompts_in_memory(encoded: Iterator[Encoded | None], prompt_key: str) -> PromptTable:
    """All rows and tokens in the driver; None stands for a bad row."""
    reading = _Reading(encoded, prompt_key)
    good = list(reading)
    codes = reading.codes([row for row, _ in good])
    return PromptTable(good, np.array(codes, dtype=np.int32), reading.facts())


def cached_prompts(
    depends_on: dict[str, Any], read: Callable[[], Iterator[Encoded | None]], prompt_key: str
) -> PromptTable | None:
    """The table for all that it `depends_on`; `read` gives the rows, None for a bad one."""
    import pyarrow as pa

    reading = _Reading(iter(()), prompt_key)

    def blocks() -> Iterator[Sequence[Sequence[Any]]]:
        reading.encoded = read()
        good = iter(reading)
        while block := list(islice(good, cache.ROWS_PER_BLOCK)):
            rows = [row for row, _ in block]
            reading.refuse_what_json_has_no_form_for()
            texts = list(map(json.dumps, rows))
            yield texts, [tokens for _, tokens in block], reading.codes(rows)

    columns = {"row": pa.string(), "tokens": pa.list_(pa.int32()), "source": pa.int32()}
    table = cached_table("prompts", depends_on, columns, blocks, reading.facts)
    if table is None:
        return None
    sources = table.as_array(lambda block: block.column("source").to_numpy())
    return PromptTable((), sources, table.facts, table)


class _Reading:
    """The good rows, and what is known of all of them after the last one."""

    def __init__(self, encoded: Iterator[Encoded | None], prompt_key: str) -> None:
        self.encoded = encoded
        self._prompt_key = prompt_key
        self._num_bad = 0
        self._is_plain: dict[str, bool] = {}
        self._sources: dict[str, int] = {}

    def __iter__(self) -> Iterator[Encoded]:
        for one in self.encoded:
            if one is None:
                self._num_bad += 1
                continue
            note_plain(one[0], self._is_plain)
            yield one

    def refuse_what_json_has_no_form_for(self) -> None:
        if odd := [name for name, plain in self._is_plain.items() if not plain]:
            raise NotPlainError(f"JSON has no form for values of column {odd[0]!r}")

    def codes(self, rows: Sequence[Row]) -> list[int]:
        """The number of every row's data_source."""
        names = [str(row["data_source"]) for row in rows]
        return [self._sources.setdefault(name, len(self._sources)) for name in names]

    def facts(self) -> dict[str, Any]:
        return {
            "num_bad": self._num_bad,
            "columns": plain_columns(self._is_plain, self._prompt_key),
            "data_sources": list(self._sources),
        }
