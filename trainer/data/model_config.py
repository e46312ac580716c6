"""Read `config.json` of the models that a run names, before its workers start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.data.files import listing
from verl_like.errors import ConfigError, nearest
from verl_like.files import read_json_object
from workers.models.folder import model_folder


def small_files_of(key: str, path: str) -> Path:
    """Return the folder of the model that the key names; the folder may lack the weights."""
    try:
        return model_folder(path, weights=False)
    except ConfigError as error:
        raise ConfigError(f"{key}={path}: {error}") from error


def read_model_config(key: str, path: str) -> dict[str, Any]:
    """Return `config.json` of a model folder."""
    folder = small_files_of(key, path)
    file = folder / "config.json"
    if not file.is_file():
        near = nearest(str(folder), [str(c.parent) for c in folder.parent.glob("*/config.json")])
        models = [str(config.parent) for config in sorted(folder.glob("*/config.json"))]
        tiny = "`verl-like make-tiny DIR` makes a tiny one in DIR/model."
        there = f"there is no such folder.{near} {tiny}"
        if folder.is_dir():
            there = f"it holds {listing(folder)}. {f'Set {key}={models[0]}.' if models else tiny}"
        elif folder.is_file():
            there = f"it is a file. {tiny}"
        raise ConfigError(
            f"{key}={path} is not a Hugging Face model folder (no config.json): {there}"
        )
    try:
        return read_json_object(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={path}: {file} is damaged: {error}") from error


def num_positions(described: dict[str, Any]) -> int | None:
    """Return the maximum number of tokens per row in the model's `config.json`; None: no limit."""
    for name in ("max_position_embeddings", "n_positions"):
        if described.get(name) is not None:
            return int(described[name])
    return None
