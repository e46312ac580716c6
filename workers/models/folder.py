"""Locate a model's files: in a folder, or in this machine's cache of the Hugging Face hub.

`model_folder` resolves a `model.path`. Every node downloads once, so no folder has to be shared.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from verl_like.errors import ConfigError
from verl_like.files import read_json_object

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
"""Configuration, tokenizer, templates, code."""
PARSED = ("config.json", "generation_config.json", "tokenizer_config.json")
LARGEST = 64 * 2**20
"""Largest size of a small file in bytes; the largest tokenizers have 30 MB."""


def is_on_hub(path: str) -> bool:
    """Return whether a path that does not exist here is `organisation/model`, a hub name."""
    return bool(HUB_NAME.fullmatch(path)) and not Path(path).parent.exists()


@functools.cache
def model_folder(path: str, weights: bool = True) -> Path:
    """Return the folder of this path; if it does not exist, `organisation/model` is a hub name.

    Without `weights` only the small files are guaranteed to be there.
    """
    if not is_on_hub(path):
        folder = Path(path).expanduser()
        check_small_files(folder)
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted = [*SMALL_FILES, "*.safetensors"] if weights else SMALL_FILES
    try:
        folder_of_hub = Path(snapshot_download(path, allow_patterns=wanted))
        if weights and not any(folder_of_hub.glob("*.safetensors")):
            folder_of_hub = Path(snapshot_download(path, allow_patterns=["*.bin"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"model.path={path}: there is no such folder, and the Hugging Face hub does not give "
            f"a model of that name: {' '.join(str(error).split())[:300]}"
        ) from error
    return folder_of_hub


def check_small_files(folder: Path) -> None:
    """Reject unreadable small files: pipes, devices, oversized files, and damaged JSON."""
    for file in (file for pattern in SMALL_FILES for file in folder.glob(pattern)):
        if not file.is_file():
            raise ConfigError(f"{file} is not a regular file. Replace or remove it.")
        if file.stat().st_size > LARGEST:
            raise ConfigError(
                f"{file} has {file.stat().st_size:,} bytes; at most {LARGEST:,} are read."
            )
        try:
            if file.name in PARSED:
                read_json_object(file)
        except ValueError as error:
            raise ConfigError(f"{file} is damaged: {error}. Fix or remove it.") from error


def generation_eos(path: str) -> tuple[int, ...]:
    """Return the end-of-response ids in the folder's `generation_config.json`; empty without one.

    Chat models end a turn with a token other than the eos of their tokenizer: Gemma's
    <end_of_turn>, Llama 3's <|eot_id|>, Phi-3's <|end|>.
    """
    file = model_folder(path, weights=False) / "generation_config.json"
    if not file.is_file():
        return ()
    ids = read_json_object(file).get("eos_token_id")
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)
