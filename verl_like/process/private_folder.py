"""A folder that no other user can enter, for files of runs outside their run folder."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from verl_like.errors import WorkerError


def private_folder(place: str | None = None) -> Path:
    """Return the user's own folder (mode 700) in `place`, by default in the temporary folder.

    Raise if others could enter it.
    """
    folder = Path(place or tempfile.gettempdir()) / f"verl-like-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    if not is_private or status.st_uid != os.getuid():
        raise WorkerError(
            f"{folder} is not private to this user (mode 700), so others could reach what "
            "this run keeps there: sockets, logs, data. Remove it, or set TMPDIR to a folder of "
            "your own."
        )
    return folder
