"""Atomic writes: files and folders that appear whole or not at all, and their checksums.

Checkpoints are written and checked with these. Reading JSON returns a value or raises ValueError,
whatever the file contains, and every string survives a round trip.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
"""Characters that some readers take for a line's end, and lone surrogates, which UTF-8 cannot
hold."""

SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
ON_HUB = "hub"
"""The scheme of data sets on the Hugging Face hub, which `datasets` loads."""
DRAFT = ".draft-"
"""How the names of unfinished files and folders begin."""


def is_remote(name: object) -> bool:
    """Return whether `name` is a path with a scheme."""
    match = SCHEME.match(name) if isinstance(name, str) else None
    return match is not None and match[1] != ON_HUB


def write_atomic(path: Path, contents: str | bytes, to_disk: bool = True) -> None:
    """Write a temporary file, force it to the disk, then rename it to `path`.

    If `path` is a link, the file replaces the link. With `to_disk=False` the file is not forced to
    the disk: it survives this process, but maybe not a failure of the machine.
    """
    draft = draft_path(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(draft, flags, 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(contents.encode() if isinstance(contents, str) else contents)
            if to_disk:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if to_disk:
        sync_folder(path.parent)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Context with a new folder, which replaces `folder` at the end; an error removes it."""
    draft = draft_path(folder)
    draft.mkdir(parents=True)
    try:
        yield draft
        replace_folder(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def draft_path(path: Path) -> Path:
    """Return a random name in the same folder, under which nobody could have planted a link."""
    return path.with_name(DRAFT + secrets.token_hex(8))


def cache_folder(kind: str) -> Path:
    """Return `$XDG_CACHE_HOME/verl_like/<kind>`, by default in ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "verl_like" / kind


def make_private(folder: Path) -> None:
    """Make a folder that only its user can enter; an existing folder keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def why_not_writable(folder: Path) -> str:
    """Return why no file can be written into a folder, or "".

    A file is written and removed, and so are the missing folders: permissions do not show what a
    read-only or full file system rejects.
    """
    folder = folder.absolute()
    paths = [folder, *folder.parents]
    there = next(path for path in paths if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is not a folder"
    created = []
    try:
        for path in reversed(paths[: paths.index(there)]):
            path.mkdir()
            created.append(path)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"0")
    except OSError as error:
        return f"{there} takes no new file ({error.strerror})"
    finally:
        for path in reversed(created):
            with suppress(OSError):  # another process uses it by now
                path.rmdir()
    return ""


def sync_folder(folder: Path) -> None:
    """Force the entries of a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_folder(part: Path, folder: Path) -> None:
    """Rename a finished folder, `NAME.part`, to its final name.

    An older folder of that name is moved to `NAME.old`, and removed after the rename.
    """
    old = part.with_suffix(".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    part.replace(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def fingerprint(path: Path) -> dict[str, int]:
    """Return the size and crc32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}


def file_fault(path: Path, expected: dict[str, int], reads: bool = True) -> str:
    """Describe how a file differs from its fingerprint at the time of writing; "" if intact.

    With `reads=False` only its size is compared.
    """
    if not path.is_file():
        return "is missing"
    actual = fingerprint(path) if reads else expected | {"bytes": path.stat().st_size}
    if actual == expected:
        return ""
    if actual["bytes"] != expected["bytes"]:
        return f"has {actual['bytes']} bytes, but was written with {expected['bytes']}"
    return f"has crc32 {actual['crc32']:08x}, but was written with {expected['crc32']:08x}"


def check_form(manifest: Mapping[str, Any], form: Mapping[str, type]) -> None:
    """Raise ValueError unless `manifest` has each name in `form`, with a value of its type.

    Its `files` must be fingerprints by name (`check_fingerprints`).
    """
    for name, kind in form.items():
        if type(manifest.get(name)) is not kind:
            raise ValueError(f"{name} is {manifest.get(name)!r:.40}, not of type {kind.__name__}")
    check_fingerprints(manifest.get("files"))


def check_fingerprints(files: Any) -> None:
    """Raise ValueError unless `files` maps names of files below the folder to fingerprints."""
    if not isinstance(files, dict):
        raise ValueError(f"files is {files!r:.40}, not an object of fingerprints by name")
    for name, entry in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"the file {name!r:.80} is outside of the folder")
        is_print = isinstance(entry, dict) and entry.keys() == {"bytes", "crc32"}
        if not is_print or not all(type(number) is int for number in entry.values()):
            raise ValueError(f"the file {name!r:.80} has no bytes and crc32, but {entry!r:.40}")


def json_line(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return a line of a JSONL file with its newline, as `json_lines` does."""
    return json_lines([value], default)


def json_lines(values: Iterable[Any], default: Callable[[Any], Any] | None = None) -> str:
    """Return lines of a JSONL file with their newlines, as readable text that keeps every string.

    `default` converts objects that JSON cannot represent.
    """
    encode = json.JSONEncoder(ensure_ascii=False, default=default).encode
    text = "".join(f"{encode(value)}\n" for value in values)
    return ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, which end only with newlines.

    Bytes that are not UTF-8 become the replacement character U+FFFD.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text; raise ValueError for any fault in it."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def json_objects(path: Path, text: str = "") -> tuple[list[dict[str, Any]], int]:
    """Return the objects of a JSONL file whose line contains `text`, and the number of bad lines.

    For example, a killed process leaves half a line. A file that does not exist has no lines.
    """
    objects: list[dict[str, Any]] = []
    num_broken = 0
    if not path.is_file():
        return objects, num_broken
    for line in text_lines(path):
        if text not in line:
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            objects.append(row)
        else:
            num_broken += 1
    return objects, num_broken


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ValueError if the file holds anything else."""
    value = parse_json(path.read_bytes())
    if not isinstance(value, dict):
        raise ValueError(f"it holds {value!r:.40}, not a JSON object")
    return value
