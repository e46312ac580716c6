"""Where a model's files are: its folder, or this machine's cache of the Hugging Face hub.

`model_folder` says where a `model.path` is. Every node fetches for itself, and once: no folder need
be shared.
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
"""Bytes of a small file; the largest tokenizers have 30 MB."""


@functools.cache
def model_folder(path: str, weights: bool = True) -> Path:
    """The folder of that path; where there is none, `organisation/model` is a name on the hub.

    Without `weights` only the small files are sure to be there.
    """
    folder = Path(path).expanduser()
    if not HUB_NAME.fullmatch(path) or folder.parent.exists():
        check_small_files(folder)
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    wanted = [*SMALL_FILES, "*.safetensors"] if weights else SMALL_FILES
    try:
        found = Path(snapshot_download(path, allow_patterns=wanted))
        if weights and not any(found.glob("*.safetensors")):
            found = Path(snapshot_download(path, allow_patterns=["*.bin"]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise ConfigError(
            f"model.path={path}: there is no such folder, and the Hugging Face hub does not give "
            f"a model of that name: {' '.join(str(error).split())[:300]}"
        ) from error
    return found


def check_small_files(folder: Path) -> None:
    """Refuse small files that cannot be read: pipes, devices, giants, and JSON that is damaged."""
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
            raise ConfigError(f"{file} is damaged: {error}. Mend or remove it.") from error


def generation_eos(path: str) -> tuple[int, ...]:
    """The ids that end a response by the folder's `generation_config.json`; none without one.

    Chat models end a turn with a token that is not their tokenizer's eos: Gemma's <end_of_turn>,
    Llama 3's <|eot_id|>, Phi-3's <|end|>.
    """
    file = model_folder(path, weights=False) / "generation_config.json"
    if not file.is_file():
        return ()
    found = read_json_object(file).get("eos_token_id")
    return tuple(found) if isinstance(found, list) else () if found is None else (found,)
