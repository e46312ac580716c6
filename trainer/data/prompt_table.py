"""Tokenized prompts by row number, in memory or, for large files, in a cache on disk.

    table = read_prompts(config.data, "train_files", tokenizer, needs_rules=True)
    table.row(7), table.tokens(7)

`trainer.data.row_cache` keeps the rows of large files on disk.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.data.config import DataConfig
from trainer.data.files import (
    IMAGE_REFS,
    Row,
    extra_columns,
    folders_of,
    good_rows,
    is_plain,
    names_of,
    other_columns,
    prompt_row,
    rows_of_prompts,
)
from trainer.data.media import ReadColumns, read_media
from trainer.data.prompt_tokens import DroppedCharacters, encode_prompt, readable
from verl_like.errors import ConfigError
from verl_like.files import write_atomic

logger = logging.getLogger(__name__)
CACHED_FROM_BYTES = 64 * 2**20
"""Files that are smaller in total are read at every start."""
FORMAT = 9


def cache_key(files: Sequence[str], tokenizer: Any, **settings: Any) -> str | None:
    """Hash everything that the tokens depend on; return None if these files are not cached."""
    import transformers

    paths = [Path(name) for name in files]
    if not all(path.is_file() for path in paths):
        return None  # on the Hub, or missing, which the reader reports
    if sum(path.stat().st_size for path in paths) < CACHED_FROM_BYTES:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None  # the state that determines the tokens cannot be serialized
    tokens = {
        "class": type(tokenizer).__qualname__,
        "version": transformers.__version__,
        "tokenizer": hashlib.sha256(backend.to_str().encode()).hexdigest(),
        "chat_template": tokenizer.chat_template,
    }
    stats = [(str(path.resolve()), path.stat()) for path in paths]
    model = Path(tokenizer.name_or_path)
    of_processor = [model / name for name in ("preprocessor_config.json", "processor_config.json")]
    stats += [(str(path.resolve()), path.stat()) for path in of_processor if path.is_file()]
    changed = [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    depends_on = {"format": FORMAT, "files": changed, "tokenizer": tokens, **settings}
    return hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()


Encoded = tuple[Row, NDArray[np.int64]]
"""A row and the tokens of its prompt."""
Read = Callable[[], Iterator[Encoded | None]]
"""Yields the rows of the files, and None for a bad row."""


@dataclass(frozen=True)
class PromptTable:
    """Prompt rows and their tokens, by row number."""

    row: Callable[[int], Row]
    """Returns a row, by number, as `prompt_row` returned it."""
    tokens: Callable[[int], NDArray[np.int64]]
    """Returns the tokens of a row's prompt, by number."""
    lengths: NDArray[np.int32]
    """Number of tokens of every prompt, before any cut."""
    has_images: bool
    """True if any row has images."""
    sources: Any
    """Every row's data_source, as an Arrow array."""
    num_bad: int
    """Number of bad rows, which were left out and have no row number."""
    columns: list[str]
    """Columns outside verl's schema that have plain values."""
    folder: Path | None = None
    """The folder of the cache entry; None if the rows are in memory."""

    def first_of_sources(self, rows: NDArray[np.int64]) -> dict[str, int]:
        """Map every data_source of these rows to its first row."""
        encoded = self.sources.dictionary_encode()
        codes, places = np.unique(encoded.indices.to_numpy()[rows], return_index=True)
        first_rows = sorted(zip(rows[places].tolist(), codes.tolist(), strict=True))
        return {encoded.dictionary[code].as_py(): number for number, code in first_rows}

    def remembered(self, name: str, compute: Callable[[], str]) -> str:
        """Return `compute()`, a text about the rows; a cache entry stores it under `name`."""
        if self.folder is None:
            return compute()
        path = self.folder / f"{hashlib.sha256(name.encode()).hexdigest()}.txt"
        with suppress(OSError):
            return path.read_text(encoding="utf-8")
        text = compute()
        try:
            write_atomic(path, text)
        except OSError as error:
            logger.warning("%s is not stored for later runs: %s", path, error)
        return text


def read_prompts(
    config: DataConfig, setting: str, tokenizer: Any, needs_rules: bool, limit: int | None = None
) -> PromptTable:
    """Return the valid rows of the files that `data.<setting>` names."""
    folders = folders_of(names_of(getattr(config, setting)))
    columns, model = ReadColumns([config.prompt_key]), tokenizer.name_or_path
    dropped = DroppedCharacters(tokenizer)

    def encode(where: str, row: Row) -> Encoded:
        row, refs = read_media(row, columns, folders, image_key=config.image_key, model=model)
        if refs:
            row[IMAGE_REFS] = refs
        row = prompt_row(row, config.prompt_key, needs_rules)
        try:
            tokens = encode_prompt(row[config.prompt_key], tokenizer)
        except ConfigError as error:  # the model reads no images
            raise ConfigError(f"{where}: {error}") from error
        dropped.note(row, (config.prompt_key,))
        check_length_of(where, len(tokens), config, IMAGE_REFS in row)
        return row, tokens

    def read() -> Iterator[Encoded | None]:
        dropped.counts.clear()
        rows = rows_of_prompts(config, setting, tokenizer, needs_rules, limit)
        return good_rows(rows, encode, config.on_bad_row)

    key = None
    if not config.custom_cls.path and limit is None:
        settings: dict[str, Any] = {"needs_rules": needs_rules, "on_bad_row": config.on_bad_row}
        names = names_of(getattr(config, setting))
        settings |= {"prompt_key": config.prompt_key, "image_key": config.image_key}
        key = cache_key(names, tokenizer, **settings)
    table = None if key is None else cached_prompts(key, read, config.prompt_key)
    if table is None:
        table = prompts_in_memory(read, config.prompt_key)
        dropped.warn(f"data.{setting}")
        return table
    dropped.warn(f"data.{setting}")
    for number in np.flatnonzero(table.lengths > config.max_prompt_length).tolist():
        where, length = f"data.{setting}, row {number}", int(table.lengths[number])
        has_images = table.has_images and IMAGE_REFS in table.row(number)
        check_length_of(where, length, config, has_images)
    return table


def check_length_of(where: str, num_tokens: int, config: DataConfig, has_images: bool) -> None:
    """Raise an error for a prompt that is too long, unless such prompts are dropped or cut.

    Prompts with images are never cut.
    """
    is_cut = config.truncation != "error" and not has_images
    if num_tokens > config.max_prompt_length and not (is_cut or config.filter_overlong_prompts):
        raise ConfigError(
            f"{where}: the prompt has {num_tokens} tokens, but data.max_prompt_length="
            f"{config.max_prompt_length}. Raise this limit, or set "
            "data.filter_overlong_prompts=true"
            f"{'' if has_images else ', or data.truncation=left|right'}."
        )


def prompts_in_memory(read: Read, prompt_key: str) -> PromptTable:
    """Read all rows and tokens into the driver's memory."""
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
        has_images=any(IMAGE_REFS in row for row, _ in good),
    )


def cached_prompts(key: str, read: Read, prompt_key: str) -> PromptTable | None:
    """Return the prompt table cached under `key`; on a miss, build it with `read` and write it.

    Return None if a row has values that JSON cannot represent, or if no cache can be written.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    from trainer.data.row_cache import NotPlainError, cached_rows, check_cacheable

    names: set[str] = set()

    def cells() -> Iterator[dict[str, Any] | None]:
        for encoded in read():
            if encoded is None:
                yield None
                continue
            row, tokens = encoded
            check_cacheable(row.get(IMAGE_REFS, ()))
            odd = [name for name, value in row.items() if not is_plain(value)]
            if odd:
                raise NotPlainError(f"column {odd[0]!r} has values that JSON cannot represent")
            names.update(row)
            yield {"row": json.dumps(row), "tokens": tokens, "source": _source_of(row)}

    columns = {"row": pa.string(), "tokens": pa.list_(pa.int32()), "source": pa.string()}
    entry = cached_rows(
        "prompts",
        key,
        columns,
        cells,
        lambda: {"columns": extra_columns(names, prompt_key), "has_images": IMAGE_REFS in names},
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
        **entry.summary,
    )


def _source_of(row: Row) -> str:
    name: str = readable(str(row["data_source"]))
    return name
