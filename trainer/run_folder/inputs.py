"""Digests of a run's input files, which its configuration names.

A checkpoint's marker has a digest of each: data, model folders, and code of rewards with the user's
modules that it imports. A resumed run with other contents is rejected.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config.keys import may_change_on_resume
from trainer.config.user_modules import imported_files

NAMES_OF_FILES = re.compile(r"(^|.*_)(path|file|files)$")
"""Last words of keys whose values may be files, folders or modules."""
MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
WHOLE_BYTES = 64 << 20
"""Files up to this size are read whole. Larger files (weights) are sampled in evenly spaced
blocks."""
NUM_BLOCKS = 16
BLOCK_BYTES = 1 << 20


def digests_of_inputs(schema: type, config: Mapping[str, Any]) -> dict[str, str]:
    """Return `key: file` -> digest of its contents, for all files that affect a run's numbers.

    `config` maps dotted keys to values. Names of models and data sets on a hub have no digest.
    """
    digests = {}
    for key, value in config.items():
        if may_change_on_resume(schema, key):
            continue
        for where, name in _file_names(key, value):
            path = _path_of(name)
            if path is None:
                continue
            digests[f"{where}: {name}"] = digest(path)
            for file in imported_files(path) if path.suffix == ".py" else []:
                imported = os.path.relpath(file, path.resolve().parent)
                digests[f"{where}: {imported}, which {name} imports,"] = digest(file)
    return digests


def _file_names(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Yield (key, name) for every string that may name a file, also in lists of sections."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _file_names(f"{key}.{name}", inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _file_names(key, inner)
    elif isinstance(value, str) and value and NAMES_OF_FILES.match(key.rpartition(".")[2]):
        yield key, value


def _path_of(name: str) -> Path | None:
    """Return the file or folder of that name, or the file of the module."""
    path = Path(name).expanduser()
    if path.exists():
        return path
    if not MODULE.fullmatch(name):
        return None
    try:
        spec = find_spec(name)
    except (ImportError, ValueError, AttributeError):  # the import itself reports the error
        return None
    return Path(spec.origin) if spec and spec.origin and Path(spec.origin).is_file() else None


def digest(path: Path) -> str:
    """Return a digest of a file, or of a folder's file names and contents without hidden files."""
    whole = hashlib.blake2b(digest_size=16)
    if path.is_file():
        _add(path, whole)
        return whole.hexdigest()
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        if file.is_file() and not any(part.startswith((".", "__")) for part in name.parts):
            whole.update(f"{name.as_posix()}\0".encode(errors="surrogateescape"))
            _add(file, whole)
    return whole.hexdigest()


def _add(path: Path, to: Any) -> None:
    size = path.stat().st_size
    to.update(f"{size}\0".encode())
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while block := file.read(BLOCK_BYTES):
                to.update(block)
            return
        for number in range(NUM_BLOCKS):
            file.seek(number * (size - BLOCK_BYTES) // (NUM_BLOCKS - 1))
            to.update(file.read(BLOCK_BYTES))
