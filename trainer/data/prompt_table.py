"""Tokenized prompts by row number: in memory, or those of large files in a cache on disk.

Large files are read and tokenized once; later runs map the result into memory, which does not grow
with the files.
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

from trainer.data.cache import NotPlainError, cached_rows, what_tokens_depend_on
from trainer.data.config import DataConfig
from trainer.data.files import (
    Row,
    good_rows,
    is_plain,
    names_of,
    other_columns,
    own_columns,
    prompt_row,
    rows_of_prompts,
)
from trainer.data.prompt_tokens import encode_prompt, readable
from verl_like.files import write_whole

logger = logging.getLogger(__name__)
Encoded = tuple[Row, NDArray[np.int64]]
"""A row, and the tokens of its prompt."""
Read = Callable[[], Iterator[Encoded | None]]
"""Gives the rows of the files, None for a bad one."""
CheckLength = Callable[[str, int], None]
"""(where a prompt stands, its tokens): refuses one that is too long."""


@dataclass(frozen=True)
class PromptTable:
    """Rows and tokens by number."""

    row: Callable[[int], Row]
    """A row as its file has it."""
    tokens: Callable[[int], NDArray[np.int64]]
    """The tokens of its prompt."""
    lengths: NDArray[np.int32]
    """How many tokens every prompt has, before any cut."""
    sources: Any
    """Every row's data_source, as an Arrow array."""
    num_bad: int
    """Rows of the files that were left out, and have no number."""
    columns: list[str]
    """Columns of plain values beside those of verl's schema."""
    folder: Path | None = None
    """The entry of the cache; None: all is in memory."""

    def first_of_sources(self, kept: NDArray[np.int64]) -> dict[str, int]:
        """Every data_source of these rows, and the first of its rows."""
        encoded = self.sources.dictionary_encode()
        codes, places = np.unique(encoded.indices.to_numpy()[kept], return_index=True)
        found = sorted(zip(kept[places].tolist(), codes.tolist(), strict=True))
        return {encoded.dictionary[code].as_py(): number for number, code in found}

    def remembered(self, what: str, compute: Callable[[], str]) -> str:
        """A text that follows from the rows, and from what its name says; kept with the entry."""
        if self.folder is None:
            return compute()
        path = self.folder / f"{hashlib.sha256(what.encode()).hexdigest()}.txt"
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
        return prompts_in_memory(read, config.prompt_key)
    if len(found.lengths):
        longest = int(np.argmax(found.lengths))
        check(f"data.{setting}, row {longest}", int(found.lengths[longest]))
    return found


def prompts_in_memory(read: Read, prompt_key: str) -> PromptTable:
    """All rows and tokens in the driver."""
    import pyarrow as pa

    found = list(read())
    good = [one for one in found if one is not None]
    return PromptTable(
        row=lambda number: good[number][0],
        tokens=lambda number: good[number][1],
        lengths=np.array([len(tokens) for _, tokens in good], dtype=np.int32),
        sources=pa.array([_source_of(row) for row, _ in good], pa.string()),
        num_bad=len(found) - len(good),
        columns=other_columns((row for row, _ in good), prompt_key),
    )


def cached_prompts(depends_on: dict[str, Any], read: Read, prompt_key: str) -> PromptTable | None:
    """The table for all that it `depends_on`, of plain values alone."""
    import pyarrow as pa
    import pyarrow.compute as pc

    names: set[str] = set()

    def read_plain() -> Iterator[dict[str, Any] | None]:
        for one in read():
            if one is None:
                yield None
                continue
            row, tokens = one
            if odd := [name for name, value in row.items() if not is_plain(value)]:
                raise NotPlainError(f"JSON has no form for values of column {odd[0]!r}")
            names.update(row)
            yield {"row": json.dumps(row), "tokens": tokens, "source": _source_of(row)}

    entry = cached_rows(
        "prompts",
        depends_on,
        {"row": pa.string(), "tokens": pa.list_(pa.int32()), "source": pa.string()},
        read_plain,
        lambda: {"columns": own_columns(names, prompt_key)},
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
