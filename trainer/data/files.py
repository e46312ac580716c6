"""Rows of parquet, CSV and JSONL files, or of the user's data set; a bad one is named by number.

`rows_of_prompts` gives rows of prompts, `rows_of_files` those of recipes that generate nothing, and
`good_rows` what is made of either. Files may be data sets by name on the Hugging Face hub
(`trainer.data.hub`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from trainer.data.config import DataConfig
from trainer.data.formats import csv_rows, json_rows, parquet_rows
from trainer.data.hub import hub_files, is_hub_name
from trainer.data.prompt_tokens import check_messages
from verl_like.errors import ConfigError, few, nearest
from verl_like.registry import load_from
from verl_like.signatures import Call, check_call
from workers.rewards.functions import GIVE_REWARD

logger = logging.getLogger(__name__)
Row = dict[str, Any]
RULE_COLUMNS = ("data_source", "reward_model")
PLAIN = (str, int, float, bool, type(None))
"""Values that stay what they are as JSON."""
WAY_OUT = " Mend it, or leave such rows out with data.on_bad_row=skip."
T = TypeVar("T")


def read_rows(
    config: DataConfig, setting: str, tokenizer: Any = None, needs_rules: bool = True
) -> tuple[list[Row], int]:
    """The rows of prompts that a run would read, and how many it would skip."""
    rows = rows_of_prompts(config, setting, tokenizer, needs_rules)
    found = list(
        good_rows(
            rows, lambda _, row: prompt_row(row, config.prompt_key, needs_rules), config.on_bad_row
        )
    )
    good = [row for row in found if row is not None]
    return good, len(found) - len(good)


def good_rows(
    rows: Iterable[tuple[str, Any]], make: Callable[[str, Row], T], on_bad_row: str | None
) -> Iterator[T | None]:
    """What `make` makes of each row with its place, one by one; None for each that is skipped.

    A ValueError of `make` says what is wrong with a row. It stops the run or, where `on_bad_row` is
    skip, the row is left out; None is that of a recipe without the key.
    """
    was_one_skipped = False
    for where, row in rows:
        try:
            if isinstance(row, ValueError):
                raise row
            if not isinstance(row, dict):
                raise ValueError(f"it is a {type(row).__name__}, not an object with columns")
            made: T | None = make(where, row)
        except ConfigError:  # of all rows, not of this one
            raise
        except ValueError as problem:
            if on_bad_row != "skip":
                raise ConfigError(
                    f"{where}: {problem}.{WAY_OUT if on_bad_row else ''}"
                ) from problem
            if not was_one_skipped:
                story = "%s: %s; it and others like it are skipped (data.on_bad_row=skip)"
                logger.warning(story, where, problem)
            was_one_skipped, made = True, None
        yield made


def prompt_row(row: Row, prompt_key: str, needs_rules: bool) -> Row:
    """A row that has a prompt; a ValueError says what it lacks.

    Where rules by data_source score it (`needs_rules`), it has a data_source, and a reward_model
    with its ground_truth; else these are filled in.
    """
    if not needs_rules:
        row = with_rule_columns(row)
    for column in (prompt_key, *RULE_COLUMNS):
        if row.get(column) is None:
            way_out = f". {GIVE_REWARD}" if column in RULE_COLUMNS else ""
            there = filled_columns(row)
            raise ValueError(f"nothing in column {column!r}; there is {there}{way_out}")
    prompt, rule = row[prompt_key], row["reward_model"]
    if isinstance(prompt, str | list) and not prompt:
        raise ValueError(f"{prompt_key!r} is empty")
    if not isinstance(prompt, str):
        check_messages(prompt_key, prompt)
    if not isinstance(rule, dict):
        raise ValueError(f"reward_model is {rule!r:.80}, not an object with 'ground_truth'")
    if "ground_truth" not in rule:
        raise ValueError(f"reward_model has no 'ground_truth', only {filled_columns(rule)}")
    return row


def with_rule_columns(row: Row) -> Row:
    """The row; where it has none, "unknown" for its data_source, and its column ground_truth."""
    rule = row.get("reward_model")
    if rule is None or (isinstance(rule, dict) and "ground_truth" not in rule):
        row = row | {"reward_model": {**(rule or {}), "ground_truth": row.get("ground_truth")}}
    return row if row.get("data_source") else row | {"data_source": "unknown"}


@dataclass
class FirstRows:
    """How many rows are read of each list of files, and whether one had more."""

    number: int
    were_more: bool = False


_first_rows: ContextVar[FirstRows | None] = ContextVar("first_rows", default=None)


@contextmanager
def first_rows(number: int) -> Iterator[FirstRows]:
    """Within, only so many rows of each list of files are read: for a dry run."""
    most = FirstRows(number)
    before = _first_rows.set(most)
    try:
        yield most
    finally:
        _first_rows.reset(before)


def are_first_rows_enough() -> bool:
    """Whether this is within `first_rows`."""
    return _first_rows.get() is not None


def _cut(rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    most = _first_rows.get()
    if most is None:
        yield from rows
        return
    yield from islice(rows, most.number)
    most.were_more |= next(rows, None) is not None


def rows_of_prompts(
    config: DataConfig, setting: str, tokenizer: Any, needs_rules: bool
) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) of the files, or the user's data set, that the key `setting` names."""
    files = names_of(getattr(config, setting))
    if config.custom_cls.path:
        yield from _cut(_custom_rows(config, files, tokenizer))
        return
    if is_num_games(getattr(config, setting)):
        yield from _cut(_games(config, setting))
        return
    columns = (config.prompt_key, *(RULE_COLUMNS if needs_rules else ()))
    yield from rows_of_files(files, f"data.{setting}", columns)


def rows_of_files(
    files: Sequence[str], key: str, columns: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """(where it stands, row) for every row of the files that the configuration's `key` names.

    A name of a data set of the hub stands for its files (`trainer.data.hub`). A table (parquet,
    CSV) without one of the `columns` is refused at once, as is a file that is not there.
    """
    yield from _cut(_all_rows(files, key, columns))


def _all_rows(files: Sequence[str], key: str, columns: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name in files:
        for path in hub_files(name, key) if is_hub_name(name) else [Path(name)]:
            _check_file(path, key)
            check = partial(_check, path, columns)
            if path.suffix == ".parquet":
                yield from parquet_rows(path, check)
            elif path.suffix == ".csv":
                yield from csv_rows(path, check)
            else:
                yield from json_rows(path)


def is_num_games(files: Any) -> bool:
    """Whether it is a number of rows without a prompt, for environments that say all."""
    return type(files) is int


def _games(config: DataConfig, setting: str) -> Iterator[tuple[str, Row]]:
    number = getattr(config, setting)
    for game in range(number):
        prompt = [{"role": "user", "content": ""}]
        yield f"data.{setting}={number}, row {game}", {config.prompt_key: prompt}


def names_of(files: str | int | Sequence[str] | None) -> list[str]:
    """One name, several, or none; a number is the name of no file."""
    if not files:
        return []
    if isinstance(files, int):
        return [str(files)]
    return [files] if isinstance(files, str) else list(files)


def check_files(config: DataConfig) -> None:
    """Refuse names of files that are not there, before anything is read."""
    if config.custom_cls.path:
        return  # what its names stand for is the class's own affair
    for setting in ("train_files", "val_files"):
        if is_num_games(getattr(config, setting)):
            continue
        for name in names_of(getattr(config, setting)):
            if not is_hub_name(name):
                _check_file(Path(name), f"data.{setting}")


def _check_file(path: Path, key: str) -> None:
    if path.is_dir():
        raise ConfigError(
            f"{key}: {path} is a folder, which holds {listing(path)}. Name its files: "
            f"{key}=[{path}/<file>, ...]."
        )
    if not path.is_file():
        raise ConfigError(
            f"{key}: there is no file {path}; {path.parent} holds {listing(path.parent)}."
        )


def _custom_rows(
    config: DataConfig, files: Sequence[str], tokenizer: Any
) -> Iterator[tuple[str, Any]]:
    custom = config.custom_cls
    make = load_from(custom.path, custom.name, "data.custom_cls.path", "data.custom_cls.name")
    call = Call(by_name=("data_files", "tokenizer", "config"))
    check_call(make, f"data.custom_cls.name={custom.name}", call)
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


def _check(path: Path, wanted: Sequence[str], there: Sequence[str]) -> None:
    for column in there:
        if column and there.count(column) > 1:  # spreadsheets write columns without a name
            raise ConfigError(f"{path}: two of its columns have the name {column!r}; rename one.")
    for column in wanted:
        if column not in there:
            rule = column in RULE_COLUMNS
            way_out = GIVE_REWARD if rule else "The prompts' column is set by data.prompt_key"
            raise ConfigError(
                f"{path}: no column {column!r}; there is {', '.join(there)}."
                f"{nearest(column, there)} {way_out}."
            )


def filled_columns(row: Row) -> str:
    """The names of a row's columns that have a value, for a message."""
    filled = sorted(name for name, value in row.items() if value is not None)
    return ", ".join(filled) or "nothing"


def listing(folder: Path) -> str:
    """What a folder holds, for messages."""
    if not folder.is_dir():
        return "nothing: the folder is not there"
    names = sorted(entry.name for entry in folder.iterdir())
    return few(names) or "nothing"


def other_columns(rows: Iterable[Row], prompt_key: str) -> list[str]:
    """Columns of plain values beside those of verl's schema; images and the like are none."""
    plain: dict[str, bool] = {}
    for row in rows:
        for name, value in row.items():
            plain[name] = plain.get(name, True) and is_plain(value)
    return own_columns((name for name in plain if plain[name]), prompt_key)


def own_columns(names: Iterable[str], prompt_key: str) -> list[str]:
    """The columns that verl's schema does not have, sorted."""
    return sorted({*names} - {prompt_key, *RULE_COLUMNS, "extra_info"})


def is_plain(value: Any) -> bool:
    """Whether JSON has a form for it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)
