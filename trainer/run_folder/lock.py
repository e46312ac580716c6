"""One run at a time in a run folder: `run.lock`, which says whose the folder is.

    with FolderLock(folder) as lock:     # takes it, if the folder is there already
        ...
        lock.take()                      # once it is

The operating system gives the lock back when its process ends, however it ends: what a killed run
left is taken over. Where a file system has no locks, the run goes on without, and says so.
"""

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

LOCK_FILE = "run.lock"
logger = logging.getLogger(__name__)


class FolderLock:
    """Held from `take` to the end of the `with` block."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder) / LOCK_FILE
        self._descriptor: int | None = None

    def __enter__(self) -> FolderLock:
        """Refuses a folder in which another run is at work."""
        if self.path.parent.is_dir():
            self.take()
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            self.path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = None

    def take(self) -> None:
        """Take the lock of a folder that is there, unless it is ours already."""
        if self._descriptor is not None:
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                logger.warning(
                    "%s cannot be locked (%s): do not start a second run there.", self.path, error
                )
                return
            raise ConfigError(
                f"trainer.default_local_dir={self.path.parent} is in use by {_owner(self.path)}. "
                "Wait for it, end it, or choose another folder."
            ) from error

        if not _is_at(self.path, descriptor):
            os.close(descriptor)  # its owner has just ended, and taken the file away
            self.take()
            return
        self._descriptor = descriptor
        if os.fstat(descriptor).st_size:
            logger.info("%s was left by %s, and is taken over", self.path, _owner(self.path))
        self._sign(descriptor)

    def _sign(self, descriptor: int) -> None:
        facts = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.ctime()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(facts).encode(), 0)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether the open file still has its name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _owner(path: Path) -> str:
    try:
        facts = read_json_object(path)
        return f"process {facts['pid']} on {facts['host']}, a run since {facts['since']}"
    except (OSError, ValueError, KeyError):
        return "another run, which has just started or ended"
