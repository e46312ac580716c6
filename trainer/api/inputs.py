"""What a call has in memory, as files of the run folder: a model, rows, prompts.

A resumed run, the report and the command line then find it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from verl_like.files import json_line, write_whole

Row = dict[str, Any]
FILE_ENDINGS = (".parquet", ".jsonl", ".json", ".gz")
DATA_SOURCE = "prompts"
"""The `data_source` of prompts that have none: a word in validation metrics."""


def model_path(model: Any, tokenizer: Any, folder: Path) -> str:
    """The path of a model: what is in memory is written into `folder`."""
    if isinstance(model, str | Path):
        if tokenizer is not None:
            raise ConfigError(
                f"tokenizer={tokenizer!r:.60}: the tokenizer of model={str(model)!r} is the one in "
                "its folder. Drop it, or give the model itself."
            )
        return str(model)

    if not (hasattr(model, "save_pretrained") and hasattr(model, "config")):
        raise ConfigError(
            f"model is a {type(model).__name__}: give a folder, a name on the hub, or a model of "
            "transformers; of a module around one, give the model inside. A module of your own "
            "has no class that other processes could load it by: transformers' AutoConfig.register "
            "and AutoModelForCausalLM.register give it one."
        )
    if hasattr(model, "merge_and_unload"):
        raise ConfigError(
            f"model is a {type(model).__name__}: its folder would hold adapters alone. Give "
            "model.merge_and_unload(), and train LoRA by the keys lora_rank and lora_alpha."
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"model is a {type(model).__name__} in memory, and tokenizer={tokenizer!r:.60}: give "
            "its tokenizer, too."
        )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def is_file_name(data: Any) -> bool:
    """Whether it names one file of rows, or a list of them; a list of other texts is rows."""
    if isinstance(data, str | Path):
        return True
    return isinstance(data, list | tuple) and bool(data) and all(map(_ends_like_a_file, data))


def _ends_like_a_file(item: Any) -> bool:
    return isinstance(item, str | Path) and str(item).endswith(FILE_ENDINGS)


def file_names(data: Any) -> Any:
    """One file's name, or a list of them, as the configuration has it."""
    if isinstance(data, str | Path):
        return str(data)
    return [str(item) for item in data]


def rows_in_memory(data: Any, what: str) -> list[Any]:
    """The items of a list, of a `datasets.Dataset`, of anything that gives them one by one."""
    if not isinstance(data, Iterable) or isinstance(data, Mapping):
        parts = f" of {', '.join(map(str, data))}" if isinstance(data, Mapping) else ""
        raise ConfigError(
            f"{what} is a {type(data).__name__}{parts}: give a list, a datasets.Dataset (of splits "
            "one), or file names."
        )
    items = list(data)
    if not items:
        raise ConfigError(f"{what} is empty.")
    return items


def write_rows(rows: Iterable[Row], what: str, path: Path, may_differ: bool = True) -> str:
    """A JSON object a line; a value that JSON has no form for is refused with its place.

    Unless they `may_differ`, rows other than those that the file has are refused.
    """
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json_line(row, _plain))
        except TypeError as err:
            raise ConfigError(
                f"{what}, row {number}: {err}. Drop the column, or give a parquet file."
            ) from err
    text = "".join(lines)
    if not may_differ and path.is_file() and path.read_text(encoding="utf-8") != text:
        raise ConfigError(
            f"{what}: the run in {path.parents[1]}, which would go on from its checkpoint, has "
            f"other rows ({path}). Give those again, or choose another folder."
        )
    write_whole(path, text)
    return str(path)


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # of numpy, of torch
        return value.tolist()
    raise TypeError(f"{value!r:.60} is a {type(value).__name__}, which JSON has no form for")


def prompt_row(item: Any, prompt_key: str) -> Row:
    """A row in verl's schema of a text, a chat, or a dict; its other columns stay."""
    row = dict(item) if isinstance(item, Mapping) else {prompt_key: item}
    row.setdefault("data_source", DATA_SOURCE)
    if "reward_model" not in row:
        row["reward_model"] = {"ground_truth": row.pop("ground_truth", None)}
    return row


def text_row(item: Any) -> Row:
    """A row of a text, a chat, or a dict with columns."""
    if isinstance(item, Mapping):
        return dict(item)
    return {"text" if isinstance(item, str) else "messages": item}
