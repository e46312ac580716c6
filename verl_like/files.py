"""Atomic writes: files and folders that appear whole or not at all, and their checksums.

Checkpoints are written and checked with these. JSON is read and written so that whatever a file
holds ends in a value or in words, and every string survives.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ESCAPED = re.compile("[\x85\u2028\u2029\ud800-\udfff]")
"""What some readers take for a line's end, and lone surrogates, which UTF-8 cannot hold."""


def write_whole(path: Path, contents: str | bytes, to_disk: bool = True) -> None:
    """Write beside `path`, force it to the disk, then rename over what was there.

    Without `to_disk` nobody waits for the disk: the file outlives this process, but maybe not a
    failure of the machine.
    """
    draft = path.with_name(path.name + ".part")
    with draft.open("wb") as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)
        if to_disk:
            file.flush()
            os.fsync(file.fileno())
    draft.replace(path)
    if to_disk:
        sync_folder(path.parent)


def make_private(folder: Path) -> None:
    """Make a folder that only its user can enter; one that is there keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def what_blocks(folder: Path) -> Path | None:
    """Why files could not be written in a folder, which may be one to be made: the nearest part of
    its path that exists, where that is no folder or this user may not write there.
    """
    folder = folder.absolute()
    there = next(each for each in (folder, *folder.parents) if each.exists())
    return None if there.is_dir() and os.access(there, os.W_OK) else there


def sync_folder(folder: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_in_place(part: Path, folder: Path) -> None:
    """Rename a finished folder to its name; an older folder of that name goes only then."""
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    part.replace(folder)
    sync_folder(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def fingerprint(path: Path) -> dict[str, int]:
    """Size and crc32 of a file's bytes."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return {"bytes": path.stat().st_size, "crc32": crc}


def file_fault(path: Path, facts: dict[str, int], reads: bool = True) -> str:
    """What is wrong with a file, by the fingerprint that was noted when it was written.

    Empty where nothing is. Without `reads` only its size is looked at.
    """
    if not path.is_file():
        return "is missing"
    found = fingerprint(path) if reads else facts | {"bytes": path.stat().st_size}
    if found == facts:
        return ""
    if found["bytes"] != facts["bytes"]:
        return f"has {found['bytes']} bytes, was written with {facts['bytes']}"
    return f"has a crc32 of {found['crc32']:08x}, was written with {facts['crc32']:08x}"


def refuse_other_form(found: Mapping[str, Any], form: Mapping[str, type]) -> None:
    """A ValueError unless every name of `form` has a value of its type, and `files` is one of
    fingerprints.
    """
    for name, kind in form.items():
        if type(found.get(name)) is not kind:
            raise ValueError(f"{name} is {found.get(name)!r:.40}, not of type {kind.__name__}")
    refuse_other_facts(found.get("files"))


def refuse_other_facts(files: Any) -> None:
    """A ValueError unless `files` has a fingerprint for every name of a file below the folder."""
    if not isinstance(files, dict):
        raise ValueError(f"files is {files!r:.40}, not an object of fingerprints by name")
    for name, facts in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"the file {name!r:.80} is outside of the folder")
        is_print = isinstance(facts, dict) and facts.keys() == {"bytes", "crc32"}
        if not is_print or not all(type(number) is int for number in facts.values()):
            raise ValueError(f"the file {name!r:.80} has no bytes and crc32, but {facts!r:.40}")


def json_line(value: Any, default: Callable[[Any], Any] | None = None) -> str:
    """A line of a JSONL file, its newline included; `json_lines` says how."""
    return json_lines([value], default)


def json_lines(values: Iterable[Any], default: Callable[[Any], Any] | None = None) -> str:
    """Lines of a JSONL file, newlines included: readable text, and every string survives.

    `default` makes something plain of what JSON has no form for.
    """
    encode = json.JSONEncoder(ensure_ascii=False, default=default).encode
    text = "".join(f"{encode(value)}\n" for value in values)
    return ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def lines_of(path: Path) -> Iterator[str]:
    """The lines of a text file, which end with newlines alone, one at a time.

    Bytes that are no UTF-8 are shown as such.
    """
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        for line in file:
            yield line.removesuffix("\n")


def parse_json(text: str | bytes) -> Any:
    """The value that a text stands for; whatever is wrong with the text is a ValueError."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deeply") from error


def json_objects(path: Path, text: str = "") -> tuple[list[dict[str, Any]], int]:
    """The objects of a file, one a line that has the text, and how many of these lines are none.

    A process that is killed leaves half a line; a file that is not there has no lines.
    """
    found, num_broken = [], 0
    for line in lines_of(path) if path.is_file() else ():
        if text not in line:
            continue
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict):
            found.append(row)
        else:
            num_broken += 1
    return found, num_broken


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a file; a ValueError says why there is none."""
    found = parse_json(path.read_bytes())
    if not isinstance(found, dict):
        raise ValueError(f"it holds {found!r:.40}, not a JSON object")
    return found
