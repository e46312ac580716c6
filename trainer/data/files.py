"""Rows of parquet and JSONL files, or of the user's data set; a bad one is named by its number.

`trainer.data.prompts.PromptLoader` calls `read_rows`, `trainer.data.lm_rows` `rows_of_files`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trainer.data.config import DataConfig
from verl_like.errors import ConfigError, nearest
from verl_like.registry import load_from

logger = logging.getLogger(__name__)
Row = dict[str, Any]
RULE_COLUMNS = ("data_source", "reward_model")
PLAIN = str | int | float | bool | None
"""Values that stay what they are as JSON."""


def read_rows(config: DataConfig, setting: str, tokenizer: Any = None) -> tuple[list[Row], int]:
    """The rows in order, and how many were skipped.

    `setting` names the files to read: train_files or val_files of `config`.

    A row has a prompt, a data_source and a reward_model with its ground_truth. One that has not
    stops the run or, with data.on_bad_row=skip, is left out and counted.
    """
    files = getattr(config, setting)
    rows: list[Row] = []
    skipped = 0
    for where, row in _rows_of(
        config, [files] if isinstance(files, str) else list(files), setting, tokenizer
    ):
        problem = _problem(row, config.prompt_key)
        if problem is None:
            rows.append(row)
            continue
        if config.on_bad_row == "error":
            raise ConfigError(
                f"{where}: {problem}. Mend it, or leave such rows out with data.on_bad_row=skip."
            )
        skipped += 1
        if skipped == 1:
            logger.warning(
                "%s: %s; it and others like it are skipped (data.on_bad_row=skip)", where, problem
            )
    return rows, skipped


def _rows_of(
    config: DataConfig, files: Sequence[str], setting: str, tokenizer: Any
) -> Iterator[tuple[str, Any]]:
    """(where it stands, row)."""
    if config.custom_cls.path:
        yield from _custom_rows(config, files, tokenizer)
        return
    yield from rows_of_files(files, f"data.{setting}", (config.prompt_key, *RULE_COLUMNS))


def rows_of_files(
    files: Sequence[str], key: str, columns: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) for every row of the files that the configuration's `key` names.

    A parquet file without one of the `columns` is refused at once, as is one that is not there.
    """
    for name in files:
        path = Path(name)
        if not path.is_file():
            raise ConfigError(
                f"{key}: there is no file {path}; {path.parent} holds {listing(path.parent)}."
            )
        yield from _parquet_rows(path, columns) if path.suffix == ".parquet" else _json_rows(path)


def _custom_rows(
    config: DataConfig, files: Sequence[str], tokenizer: Any
) -> Iterator[tuple[str, Any]]:
    custom = config.custom_cls
    make = load_from(custom.path, custom.name, "data.custom_cls")
    made = make(data_files=files, tokenizer=tokenizer, config=config)
    if not hasattr(made, "__iter__") and not (
        hasattr(made, "__len__") and hasattr(made, "__getitem__")
    ):
        raise ConfigError(
            f"data.custom_cls: {custom.name} gave a {type(made).__name__}, which has no rows to "
            "read."
        )
    rows = made if hasattr(made, "__iter__") else (made[index] for index in range(len(made)))
    for index, row in enumerate(rows):
        yield f"{custom.path}:{custom.name}, row {index}", row


def _parquet_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except pa.ArrowInvalid as err:
        raise ConfigError(f"{path} is not a readable parquet file: {err}") from err
    for column in columns:
        if column not in table.column_names:
            raise ConfigError(
                f"{path}: no column {column!r}; there is "
                f"{', '.join(table.column_names)}.{nearest(column, table.column_names)} The "
                "prompts' column is set by data.prompt_key."
            )
    for index, row in enumerate(table.to_pylist()):
        yield f"{path}, row {index}", row


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as err:
                row = ValueError(
                    f"not JSON ({err}); a file that does not end in .parquet has a JSON object a "
                    "line"
                )
            yield f"{path}, line {number}", row


def _problem(row: Any, prompt_key: str) -> str | None:
    """What is wrong with a row, if anything."""
    if isinstance(row, ValueError):
        return str(row)
    if not isinstance(row, dict):
        return f"it is a {type(row).__name__}, not an object with columns"
    for column in (prompt_key, *RULE_COLUMNS):
        if row.get(column) is None:
            filled = sorted(name for name, value in row.items() if value is not None)
            return f"nothing in column {column!r}; there is {', '.join(filled)}"
    prompt = row[prompt_key]
    if not prompt:
        return f"{prompt_key!r} is empty"
    if not isinstance(prompt, str) and not all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt
    ):
        return (
            f"{prompt_key!r} is neither a string nor a list of messages with role and content: "
            f"{prompt!r:.80}"
        )
    rule = row["reward_model"]
    if not isinstance(rule, dict):
        return f"reward_model is {rule!r:.80}, not an object with 'ground_truth'"
    if "ground_truth" not in rule:
        return f"reward_model has no 'ground_truth', only {', '.join(sorted(rule)) or 'nothing'}"
    return None


def listing(folder: Path) -> str:
    """What a folder holds, for messages."""
    if not folder.is_dir():
        return "nothing: the folder is not there"
    names = sorted(entry.name for entry in folder.iterdir())
    return (
        ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        or "nothing"
    )


def other_columns(rows: Iterable[Row], prompt_key: str) -> list[str]:
    """Columns of plain values beside those of verl's schema; images and the like are none."""
    found: dict[str, bool] = {}
    for row in rows:
        for name, value in row.items():
            found[name] = found.get(name, True) and is_plain(value)
    ours = (prompt_key, *RULE_COLUMNS, "extra_info")
    return sorted(name for name, plain in found.items() if plain and name not in ours)


def is_plain(value: Any) -> bool:
    """Whether JSON has a form for it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)
