"""Tokenized prompts by row number: in memory, or for large files in a cache on disk.

Large files are read and tokenized once. Later runs map the result, so memory does not grow with the
files.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.cache import NotPlainError, cache_key, cached_rows
from trainer.data.config import DataConfig
from trainer.data.files import (
    Row,
    extra_columns,
    good_rows,
    is_plain,
    names_of,
    other_columns,
    prompt_row,
    rows_of_prompts,
)
from trainer.data.prompt_tokens import encode_prompt, readable
from verl_like.files import write_whole

logger = logging.getLogger(__name__)
Encoded = tuple[Row, NDArray[np.int64]]
"""A row and the tokens of its prompt."""
Read = Callable[[], Iterator[Encoded | None]]
"""Yields the rows of the files, None for a bad one."""
CheckLength = Callable[[str, int], None]
"""(place of a prompt, number of its tokens): raises an error if it is too long."""


@dataclass(frozen=True)
class PromptTable:
    """Rows and tokens by number."""

    row: Callable[[int], Row]
    """A row as its file has it."""
    tokens: Callable[[int], NDArray[np.int64]]
    """The tokens of its prompt."""
    lengths: NDArray[np.int32]
    """Number of tokens of every prompt, before any cut."""
    sources: Any
    """Every row's data_source, as an Arrow array."""
    num_bad: int
    """Rows of the files that were left out; they have no number."""
    columns: list[str]
    """Columns of plain values that verl's schema does not have."""
    folder: Path | None = None
    """The entry of the cache; None if the rows are in memory."""

    def first_of_sources(self, kept: NDArray[np.int64]) -> dict[str, int]:
        """Return every data_source of these rows with the first of its rows."""
        encoded = self.sources.dictionary_encode()
        codes, places = np.unique(encoded.indices.to_numpy()[kept], return_index=True)
        first_rows = sorted(zip(kept[places].tolist(), codes.tolist(), strict=True))
        return {encoded.dictionary[code].as_py(): number for number, code in first_rows}

    def remembered(self, what: str, compute: Callable[[], str]) -> str:
        """Return `compute()`, a text that depends on the rows and `what`; the entry stores it."""
        if self.folder is None:
            return compute()
        path = self.folder / f"{hashlib.sha256(what.encode()).hexdigest()}.txt"
        with suppress(OSError):
            return path.read_text(encoding="utf-8")
        text = compute()
        try:
            write_whole(path, text)
        except OSError as error:
            logger.warning("%s is not stored for later runs: %s", path, error)
        return text


def read_prompts(
    config: DataConfig,
    setting: str,
    tokenizer: Any,
    needs_rules: bool,
    check: CheckLength,
    limit: int | None = None,
) -> PromptTable:
    """Return the good rows of the files that the key `setting` of `config` names."""

    def encode(where: str, row: Row) -> Encoded:
        row = prompt_row(row, config.prompt_key, needs_rules)
        tokens = encode_prompt(row[config.prompt_key], tokenizer)
        check(where, len(tokens))
        return row, tokens

    def read() -> Iterator[Encoded | None]:
        rows = rows_of_prompts(config, setting, tokenizer, needs_rules, limit)
        return good_rows(rows, encode, config.on_bad_row)

    key = None
    if not config.custom_cls.path and limit is None:
        settings = {"needs_rules": needs_rules, "on_bad_row": config.on_bad_row}
        names = names_of(getattr(config, setting))
        key = cache_key(names, tokenizer, prompt_key=config.prompt_key, **settings)
    table = None if key is None else cached_prompts(key, read, config.prompt_key)
    if table is None:
        return prompts_in_memory(read, config.prompt_key)
    if len(table.lengths):
        longest = int(np.argmax(table.lengths))
        check(f"data.{setting}, row {longest}", int(table.lengths[longest]))
    return table


def prompts_in_memory(read: Read, prompt_key: str) -> PromptTable:
    """Return all rows and tokens in the driver's memory."""
    import pyarrow as pa

    encoded = list(read())
    good = [row_and_tokens for row_and_tokens in encoded if row_and_tokens is not None]
    return PromptTable(
        row=lambda number: good[number][0],
        tokens=lambda number: good[number][1],
        lengths=np.array([len(tokens) for _, tokens in good], dtype=np.int32),
        sources=pa.array([_source_of(row) for row, _ in good], pa.string()),
        num_bad=len(encoded) - len(good),
        columns=other_columns((row for row, _ in good), prompt_key),
    )


def cached_prompts(key: str, read: Read, prompt_key: str) -> PromptTable | None:
    """Return the table of the entry with that key; it holds only plain values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names: set[str] = set()

    def cells() -> Iterator[dict[str, Any] | None]:
        for encoded in read():
            if encoded is None:
                yield None
                continue
            row, tokens = encoded
            if odd := [name for name, value in row.items() if not is_plain(value)]:
                raise NotPlainError(f"JSON has no form for values of column {odd[0]!r}")
            names.update(row)
            yield {"row": json.dumps(row), "tokens": tokens, "source": _source_of(row)}

    columns = {"row": pa.string(), "tokens": pa.list_(pa.int32()), "source": pa.string()}
    entry = cached_rows(
        "prompts", key, columns, cells, lambda: {"columns": extra_columns(names, prompt_key)}
    )
    if entry is None:
        return None
    rows, tokens = entry.table.column("row"), entry.table.column("tokens")
    return PromptTable(
        row=lambda number: json.loads(rows[number].as_py()),
        tokens=lambda number: tokens[number].values.to_numpy().astype(np.int64),
        lengths=pc.list_value_length(tokens).to_numpy(),
        sources=entry.table.column("source").combine_chunks(),
        folder=entry.folder,
        **entry.facts,
    )


def _source_of(row: Row) -> str:
    name: str = readable(str(row["data_source"]))
    return name
