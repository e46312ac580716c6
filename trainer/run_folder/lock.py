"""The lock of a run folder, so that one run at a time uses it."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from verl_like.errors import ConfigError
from verl_like.files import read_json_object

logger = logging.getLogger(__name__)


class FolderLock:
    """A lock that allows one run at a time in a run folder: `run.lock`, which names the owner.

        with FolderLock(folder) as lock:     # locks the folder if it exists
            ...
            lock.take()                      # once it exists

    The operating system releases the lock when its process ends, however it ends, so a new run
    takes over the folder of a killed run. If a file system has no locks, the run continues with a
    warning.
    """

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / "run.lock"
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        """Lock an existing folder; raise if another run uses it."""
        if self.path.parent.is_dir():
            self.take()
        return self

    def __exit__(self, *_: object) -> None:
        """Release the lock; the empty file stays, because another run may be opening it."""
        if self._descriptor is not None:
            os.ftruncate(self._descriptor, 0)
            os.close(self._descriptor)
            self._descriptor = None

    def take(self) -> None:
        """Lock an existing folder, unless this object holds the lock already."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.warning(
                    "%s cannot be locked (%s). Do not start a second run in this folder.",
                    self.path,
                    error,
                )
                return
            raise ConfigError(
                f"trainer.default_local_dir={self.path.parent} is in use by {_owner(self.path)}. "
                "Wait for that run, end it, or choose another folder."
            ) from error

        self._descriptor = descriptor
        if os.fstat(descriptor).st_size:
            logger.info("%s is a stale lock of %s; taking it over", self.path, _owner(self.path))
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.ctime()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(owner).encode(), 0)


def _owner(path: Path) -> str:
    try:
        owner = read_json_object(path)
        return f"process {owner['pid']} on {owner['host']}, a run since {owner['since']}"
    except (OSError, ValueError, KeyError):
        return "another run, which has just started or ended"
