"""Removing what code of strangers has left, which may be deeper than Python can recurse."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time

LEVELS_S = 30.0
"""What the levels of a folder may take; a process that is left might add some without end."""


def remove_folder(folder: str) -> None:
    """Remove it with all that is in it and may be removed; raises nothing.

    Folders in its folders are first brought to its top, level by level, for `LEVELS_S` at most.
    """
    end = time.monotonic() + LEVELS_S
    with contextlib.suppress(OSError):
        while time.monotonic() < end:
            folders = [entry.path for entry in os.scandir(folder) if _is_folder(entry)]
            if not folders:
                break
            for path in folders:
                for entry in list(os.scandir(path)):
                    if _is_folder(entry):
                        os.rename(entry.path, os.path.join(folder, secrets.token_hex()))
                    else:
                        os.unlink(entry.path)
                os.rmdir(path)
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False)
