"""Atomic writes: files and folders that appear whole or not at all, and their checksums.

Checkpoints are written and checked with these.
"""

from __future__ import annotations

import os
import shutil
import zlib
from pathlib import Path


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
