"""Rows of Parquet, CSV and JSONL files, of Hugging Face data sets, or of the user's own class.

`rows_of_prompts` yields rows with prompts; `rows_of_files` yields the rows of recipes that do not
generate. `good_rows` converts both, and reports a bad row with its file and number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from trainer.data.config import DataConfig
from trainer.data.formats import csv_rows, is_hub_name, json_rows, load_hub_split, parquet_rows
from trainer.data.prompt_tokens import check_messages
from verl_like.errors import ConfigError, join_few, nearest
from verl_like.files import is_remote
from verl_like.registry import CallSignature, check_call, load_attribute
from workers.rewards.outcome import GIVE_REWARD

logger = logging.getLogger(__name__)
Row = dict[str, Any]
IMAGE_REFS = "image_refs"
"""The references to a row's images, in the row that a reader returns."""
DATA_SOURCE = "prompts"
"""Default `data_source` of a row, which is part of the names of validation metrics."""
RULE_COLUMNS = ("data_source", "reward_model")
PLAIN = (str, int, float, bool, type(None))
"""Types whose values JSON stores unchanged."""
GIVE_PROMPT = "The prompts' column is set by data.prompt_key"
REMEDY = " Fix it, or leave such rows out with data.on_bad_row=skip."
ADD_COLUMN = {
    "data_source": "Add it ('openai/gsm8k') to score with a built-in rule. ",
    "reward_model": "Add it ({'ground_truth': '42'}) to score with a built-in rule. ",
}
MAX_NESTING = 300
"""Maximum nesting of a column's value: Python's own functions for JSON and copies are recursive."""
DRY_RUN_ROWS = 10_000
"""Number of rows that a dry run reads from each list of files, in addition to one step's rows."""
T = TypeVar("T")


def row_limit(config: Any) -> int | None:
    """Return how many rows the run reads from each list of files; None means all."""
    if not config.trainer.dry_run:
        return None
    return DRY_RUN_ROWS + getattr(config.data, "train_batch_size", 0)


class NoColumn(ValueError):
    """A row lacks a column; if the first row does, the error does not advise skipping rows."""


def good_rows(
    rows: Iterable[tuple[str, Any]], make: Callable[[str, Row], T], on_bad_row: str
) -> Iterator[T | None]:
    """Yield `make(place, row)` for each row, or None for a row that is skipped.

    A row is bad if a ValueError is in its place, or if `make` raises one. It stops the run
    unless `on_bad_row` is `skip`. A ConfigError of `make` stops the run in any case.
    """
    has_warned = has_good = False
    for where, row in rows:
        try:
            if isinstance(row, ValueError):
                raise row
            if not isinstance(row, dict):
                raise ValueError(f"it is not an object with columns ({type(row).__name__})")
            check_nesting(row)
            result: T | None = make(where, row)
            has_good = True
        except ConfigError:  # needs another setting, such as for an overlong prompt
            raise
        except ValueError as problem:
            if on_bad_row != "skip":
                remedy = REMEDY if has_good or not isinstance(problem, NoColumn) else ""
                raise ConfigError(f"{where}: {problem}.{remedy}") from problem
            if not has_warned:
                story = "%s: %s; such rows are skipped (data.on_bad_row=skip)"
                logger.warning(story, where, problem)
            has_warned, result = True, None
        yield result


def check_nesting(row: Row) -> None:
    """Raise ValueError if a column's value has more than `MAX_NESTING` levels."""
    for name, value in row.items():
        level, depth = [value], 0
        while containers := [inner for inner in level if isinstance(inner, dict | list | tuple)]:
            depth += 1
            if depth > MAX_NESTING:
                raise ValueError(f"{name!r} has more than {MAX_NESTING} levels of nesting")
            level = [
                inner
                for container in containers
                for inner in (container.values() if isinstance(container, dict) else container)
            ]


def prompt_row(row: Row, prompt_key: str, needs_rules: bool) -> Row:
    """Check that a row has a prompt and the required columns, and return it.

    A ValueError says what the row lacks. With `needs_rules`, the rule of its data_source scores the
    row, so it needs a data_source, and a reward_model with a ground_truth. Otherwise, missing
    columns are filled in.
    """
    in_file = row
    if not needs_rules:
        row = with_rule_columns(row)
    for column in (prompt_key, *RULE_COLUMNS):
        if row.get(column) is None:
            problem = f"column {column!r} is empty" if column in row else f"no column {column!r}"
            is_rules = column in RULE_COLUMNS
            remedy = f"{ADD_COLUMN[column]}{GIVE_REWARD}" if is_rules else GIVE_PROMPT
            text = f"{problem}; non-empty columns: {filled_columns(in_file)}. {remedy}"
            raise ValueError(text) if column in row else NoColumn(text)
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


def ground_truth_of(row: Row) -> Any:
    """Return the row's column `ground_truth` or, without it, `answer`; None if it has neither."""
    return row.get("ground_truth", row.get("answer"))


def with_rule_columns(row: Row) -> Row:
    """Add a data_source and a ground truth to the row if they are missing."""
    rule = row.get("reward_model")
    if rule is None or (isinstance(rule, dict) and "ground_truth" not in rule):
        row = row | {"reward_model": {**(rule or {}), "ground_truth": ground_truth_of(row)}}
    return row if row.get("data_source") else row | {"data_source": DATA_SOURCE}


def rows_of_prompts(
    config: DataConfig, setting: str, tokenizer: Any, needs_rules: bool, limit: int | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) from the files, or from the user's class, that `data.<setting>` names."""
    value, key = getattr(config, setting), f"data.{setting}"
    if config.custom_cls.path:
        rows = _custom_rows(config, names_of(value), tokenizer)
    elif is_num_prompts(value):
        rows = (
            (f"{key}={value}, row {row}", {config.prompt_key: [{"role": "user", "content": ""}]})
            for row in range(value)
        )
    else:
        columns = (config.prompt_key, *(RULE_COLUMNS if needs_rules else ()))
        rows = rows_of_files(names_of(value), key, columns)
    return first_rows(rows, limit, key)


def first_rows(
    rows: Iterator[tuple[str, Any]], limit: int | None, key: str
) -> Iterator[tuple[str, Any]]:
    """Yield at most `limit` rows (see `row_limit`) of the files that the setting `key` names."""
    yield from islice(rows, limit)
    if limit is not None and next(rows, None) is not None:
        logger.info("%s: the first %s rows were read; a run reads them all", key, f"{limit:,}")


def rows_of_files(
    files: Sequence[str], key: str, columns: Sequence[str] = ()
) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for every row of the files that the configuration's `key` names.

    A file may also be a data set of the Hugging Face Hub. A missing file stops the run, and so does
    a table (Parquet, CSV, Hub) that lacks one of the `columns`.
    """
    for name in files:
        if is_hub_name(name):
            split = load_hub_split(name, key)
            _check(name, columns, split.column_names)
            for number, row in enumerate(split):
                yield f"{name}, row {number}", row
            continue
        path = Path(name)
        _check_file(path, key)
        check = partial(_check, path, columns)
        if path.suffix == ".parquet":
            yield from parquet_rows(path, check)
        elif path.suffix == ".csv":
            yield from csv_rows(path, check)
        else:
            yield from json_rows(path)


def is_num_prompts(files: Any) -> bool:
    """Return whether `files` is a number of prompts that an environment makes."""
    return type(files) is int


def folders_of(names: Sequence[str]) -> list[Path]:
    """Return the folders of data files, and the current one, for relative paths of images."""
    return [*dict.fromkeys(Path(name).parent for name in names), Path()]


def names_of(
    files: str | int | Sequence[str] | None, key: str = "data.train_files or data.val_files"
) -> list[str]:
    """Return the file names as a list; a number of prompts counts as one name.

    A remote file is downloaded, and its name is that of the local copy.
    """
    if not files:
        return []
    if isinstance(files, int):
        return [str(files)]
    names = [files] if isinstance(files, str) else list(files)
    if not any(map(is_remote, names)):
        return names
    from verl_like.remote_files import local_copy

    return [str(local_copy(name, key)) if is_remote(name) else name for name in names]


def check_files(config: Any, settings: Sequence[str] = ("train_files", "val_files")) -> None:
    """Raise an error for a missing or empty file of the section `data`, before anything is read."""
    if hasattr(config, "custom_cls") and config.custom_cls.path:
        return  # the user's class decides what the names mean
    for setting in settings:
        if is_num_prompts(getattr(config, setting)):
            continue
        for name in names_of(getattr(config, setting), f"data.{setting}"):
            if not is_hub_name(name):
                _check_file(Path(name), f"data.{setting}")


def _check_file(path: Path, key: str) -> None:
    if path.is_dir():
        raise ConfigError(
            f"{key}: {path} is a folder, which contains {listing(path)}. Name its files: "
            f"{key}=[{path}/<file>, ...]."
        )
    if not path.is_file():
        folder = path.parent.absolute() if path.parent == Path() else path.parent
        near = nearest(path.name, [e.name for e in folder.iterdir()] if folder.is_dir() else [])
        raise ConfigError(
            f"{key}: there is no file {path}.{near} {folder} contains {listing(folder)}."
        )
    if path.stat().st_size == 0:
        raise ConfigError(f"{key}: {path} is empty.")


def _custom_rows(
    config: DataConfig, files: Sequence[str], tokenizer: Any
) -> Iterator[tuple[str, Any]]:
    """Yield (place, row) for each row of the user's dataset `data.custom_cls`."""
    custom = config.custom_cls
    make = load_attribute(custom.path, custom.name, "data.custom_cls.path", "data.custom_cls.name")
    call = CallSignature(by_name=("data_files", "tokenizer", "config"))
    check_call(make, f"data.custom_cls.name={custom.name}", call)
    dataset = make(data_files=files, tokenizer=tokenizer, config=config)
    if hasattr(dataset, "__iter__"):
        rows = dataset
    elif hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
        rows = (dataset[index] for index in range(len(dataset)))
    else:
        raise ConfigError(
            f"data.custom_cls: {custom.name} returned {dataset!r:.60}, which has no "
            "rows to read. Return an iterable, or an object with __len__ and __getitem__."
        )
    for index, row in enumerate(rows):
        yield f"{custom.path}:{custom.name}, row {index}", row


def _check(path: Path | str, required: Sequence[str], there: Sequence[str]) -> None:
    for column in there:
        if column and there.count(column) > 1:  # spreadsheets write unnamed columns
            raise ConfigError(f"{path}: two columns have the name {column!r}. Rename one.")
    for column in required:
        if column not in there:
            rule = column in RULE_COLUMNS
            remedy = GIVE_REWARD if rule else GIVE_PROMPT
            raise ConfigError(
                f"{path}: no column {column!r}. Columns: {', '.join(there)}."
                f"{nearest(column, there)} {remedy}."
            )


def filled_columns(row: Row) -> str:
    """Return the names of a row's columns that have a value, for a message."""
    filled = sorted(name for name, value in row.items() if value is not None)
    return ", ".join(filled) or "none"


def listing(folder: Path) -> str:
    """Describe the content of a folder for error messages."""
    if not folder.is_dir():
        return "nothing: there is no such folder"
    names = sorted(entry.name for entry in folder.iterdir())
    return join_few(names) or "nothing"


def other_columns(rows: Iterable[Row], prompt_key: str) -> list[str]:
    """Return the columns outside verl's schema whose values are plain, so no images."""
    plain: dict[str, bool] = {}
    for row in rows:
        for name, value in row.items():
            plain[name] = plain.get(name, True) and is_plain(value)
    return extra_columns((name for name in plain if plain[name]), prompt_key)


def extra_columns(names: Iterable[str], prompt_key: str) -> list[str]:
    """Return the columns outside verl's schema, sorted."""
    return sorted({*names} - {prompt_key, *RULE_COLUMNS, "extra_info", IMAGE_REFS})


def is_plain(value: Any) -> bool:
    """Return whether JSON can represent the value."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_plain(inner) for key, inner in value.items())
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, PLAIN)
