"""Data sets of the Hugging Face hub, by name, through the library `datasets`.

    hub://openai/gsm8k/main:train       organisation/name, a configuration or folder, a split
    Dahoas/rm-static:test               `hub://` is optional if there is no such file

The library takes a second to import. So files on this machine have readers of their own
(`trainer.data.formats`), which also name a bad row by its line and never guess a column's type.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError

SCHEME = "hub://"
NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?P<folder>(/[\w.-]+)*)(:(?P<split>[\w.-]+))?")
FILE_ENDINGS = (".parquet", ".csv", ".json", ".jsonl", ".gz")
NOT_CONFIGURED = re.compile("BuilderConfig .* not found")
NOT_CACHED = "Couldn't find cache"
"""Beginning of the library's error if a data set, or its cache, lacks a configuration."""
PARQUET_OF_THE_HUB = "refs/convert/parquet"
"""Branch with the hub's own conversion to Parquet, for data sets that need their own code."""


def is_hub_name(name: str) -> bool:
    """Return whether `name` is a data set of the hub: it says so, or it cannot be a file here."""
    if name.startswith(SCHEME):
        return True
    is_file = name.endswith(FILE_ENDINGS) or Path(name).expanduser().parent.exists()
    return not is_file and NAME.fullmatch(name) is not None


def load_hub_split(name: str, key: str) -> Any:
    """Return one split as a `datasets.Dataset`, which the configuration's `key` names.

    The library keeps what it fetched, so a later start needs no network.
    """
    match = NAME.fullmatch(name.removeprefix(SCHEME))
    if match is None:
        raise ConfigError(
            f"{key}={name} names no data set; write {SCHEME}organisation/name, then /folder and "
            ":split where it has several."
        )
    try:
        loaded = _load(match["name"], match["folder"].strip("/") or None, match["split"])
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"{key}={name}: it is no file here, and the Hugging Face hub does not give it: {reason}"
        ) from error
    if not isinstance(loaded, dict):
        return loaded
    if len(loaded) > 1:
        raise ConfigError(
            f"{key}={name}: it has several splits; add a : and one of {', '.join(loaded)}."
        )
    return next(iter(loaded.values()))


def _load(name: str, folder: str | None, split: str | None) -> Any:
    """Load the split; `folder` is the name of a configuration, or otherwise a folder with files."""
    from datasets import load_dataset
    from huggingface_hub import snapshot_download

    place: dict[str, Any] = {"path": name, "data_dir": folder, "split": split}
    try:
        return load_dataset(name, folder, split=split)
    except RuntimeError:  # the repository has a script
        place["revision"] = PARQUET_OF_THE_HUB
    except (ConnectionError, ValueError) as error:
        if isinstance(error, ConnectionError) or NOT_CACHED in str(error):
            place["path"] = snapshot_download(name, repo_type="dataset", local_files_only=True)
        elif folder is None or not NOT_CONFIGURED.search(str(error)):
            raise
    return load_dataset(**place)
