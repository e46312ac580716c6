"""A run folder in an object store: a local copy in which the run works, and its uploads.

    with local_run_folder(config) as config:     # config.trainer.default_local_dir is local now
        ...

At first, the store's files are downloaded. While the run works in the local copy, a thread uploads
every file that changes. The marker of a checkpoint or model (`commit.json`) is uploaded after all
other files, and removed before them, so that a folder in the store is complete or no checkpoint. If
the store fails, the run goes on, and the uploads are tried again.

`remote.lock` in the store tells runs apart. Its owner changes it every few seconds, so a new run
can see whether the owner still lives.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from trainer.config.schema import RunConfig
from trainer.run_folder.folder import MODEL, STEP_FOLDER
from trainer.run_folder.resume import LATEST
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from verl_like.files import (
    DRAFT,
    cache_folder,
    is_remote,
    make_private,
    read_json_object,
    write_atomic,
)
from verl_like.process.machine import is_running
from verl_like.remote_files import RemoteFolder, describe, local_copy, version_of
from workers.training.checkpoints.manifest import MARKER

KEY = "trainer.default_local_dir"
START_KEY = "trainer.resume_from_path"
LOCK = "remote.lock"
RECORD = ".uploaded.json"
"""The file of the local copy that says which version of each file is in the store."""
NOT_UPLOADED = ("run.lock", LOCK, RECORD)
"""Files that are not uploaded."""
SCAN_EVERY_S = 15.0
"""Seconds between two looks for changed files."""
HEARTBEAT_S = 15.0
"""Seconds between two changes of the lock."""
LOCK_TIMEOUT_S = 3 * HEARTBEAT_S
"""Seconds without a change of the lock after which its owner counts as dead."""
LAST_TRIES = 3
"""Number of attempts to upload the last files when the run ends."""
logger = logging.getLogger(__name__)
C = TypeVar("C", bound=RunConfig)
Stamp = list[int]
"""Size and time of change of a local file."""


def local_copy_of(url: str) -> Path:
    """Return the folder of this machine in which a run works whose run folder is remote."""
    return cache_folder("runs").joinpath(*RemoteFolder(url, KEY).parts)


@contextmanager
def local_run_folder(config: C) -> Iterator[C]:
    """Yield the configuration with local folders, and upload the run folder if it is remote."""
    url, start = config.trainer.default_local_dir, config.trainer.resume_from_path
    run = RemoteRun(url) if is_remote(url) else None
    try:
        changes = {} if run is None else {KEY: str(run.folder)}
        if run is not None and str(start).startswith(f"{run.remote.url}/"):
            changes[START_KEY] = str(run.folder / str(start).removeprefix(f"{run.remote.url}/"))
        elif is_remote(start):
            changes[START_KEY] = str(local_copy(str(start), START_KEY))
        yield replace_keys(config, changes) if changes else config
    finally:
        if run is not None:
            run.close()


def fetched_run(url: str, needs: str) -> Path:
    """Return a local copy of a remote run folder, checkpoint or model, for reading.

    `needs` is "all", "weights" (of the newest checkpoint and the final model), or "records", which
    leaves out all weights.
    """
    remote = RemoteFolder(url, "path")
    with remote.naming():
        names = remote.files()
    markers = [re.fullmatch(MARKER_PATTERN, name) for name in names]
    steps = [int(match[1]) for match in markers if match]
    skipped = re.compile(rf"(global_step_(?!{max(steps, default=0)}/)\d+/).+(?<!/{MARKER})")
    if needs == "records":
        skipped = re.compile(rf"(global_step_\d+|{MODEL})/.+(?<!/{MARKER})")
    return local_copy(url, "path", lambda name: needs == "all" or not skipped.fullmatch(name))


MARKER_PATTERN = f"{STEP_FOLDER}/{re.escape(MARKER)}"


def without_remote_folders(config: C) -> C:
    """Return the configuration with the local folders of a run, for checks that start nothing."""
    url = config.trainer.default_local_dir
    remote = RemoteFolder(url, KEY)
    with remote.naming():
        remote.files()
    return replace_keys(config, {KEY: str(local_copy_of(url))})


def upload(path: Path, url: str) -> None:
    """Upload a file, or a folder to a path without files; `config.json` comes last."""
    remote = RemoteFolder(url, "path")
    with remote.naming():
        if path.is_file():
            _put(remote, path, "")
            return
        if remote.files():
            raise ConfigError(f"{url} has files already. Choose a path without files.")
        for file in sorted(path.rglob("*"), key=lambda file: file.name == "config.json"):
            if file.is_file():
                _put(remote, file, file.relative_to(path).as_posix())


def _put(remote: RemoteFolder, path: Path, name: str) -> None:
    remote.system.put_file(str(path), remote.path(name))


class RemoteRun:
    """The local copy of one run's folder, its uploads and its lock, until `close`."""

    def __init__(self, url: str) -> None:
        """Take the lock and download; raise if another run has the lock, or the store fails."""
        self.remote = RemoteFolder(url, KEY)
        self.folder = local_copy_of(url)
        self._owner = {"id": secrets.token_hex(8), "host": socket.gethostname()}
        self._owner |= {"pid": str(os.getpid()), "since": time.ctime()}
        self._record: dict[str, tuple[Stamp | None, str]] = {}
        """Name of a file in the store -> stamp of the local file, version in the store."""
        self._error = self._taken_by = ""
        self._closing, self._closed = threading.Event(), threading.Event()
        make_private(self.folder)
        with self.remote.naming():
            self._take_lock()
            try:
                self._download()
            except BaseException:
                self.remote.system.rm_file(self.remote.path(LOCK))
                raise
        print(f"run folder: {self.remote.url}, uploaded from {self.folder}", flush=True)
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._upload, self._beat)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Upload the last files, and release the lock; warn about files that are not uploaded."""
        uploader, beater = self._threads
        self._closing.set()
        uploader.join()
        self._closed.set()
        beater.join()
        if not self._taken_by:
            with suppress(Exception):  # a lock that stays counts as dead after LOCK_TIMEOUT_S
                self.remote.system.rm_file(self.remote.path(LOCK))
        if self._error:
            logger.warning(
                "%s lacks files of this run (%s). They are in %s, and the same command uploads "
                "them from this machine.",
                *(self.remote.url, self._error, self.folder),
            )

    # ------------------------------------------------------------------------------ the lock

    def _take_lock(self) -> None:
        """Create the lock; take over that of a dead run."""
        system, path = self.remote.system, self.remote.path(LOCK)
        try:
            system.pipe_file(path, self._beat_of(0), mode="create")
        except Exception:
            there = self._read_lock()
            if not there:
                raise  # not a lock, but a store that cannot be written
            if self._is_alive(there):
                raise ConfigError(
                    f"{KEY}={self.remote.url} is in use by process {there.get('pid')} on "
                    f"{there.get('host')}, a run since {there.get('since')}. Wait for that run, "
                    "end it, or choose another folder."
                ) from None
            logger.warning("%s/%s is of a run that died; taking it over", self.remote.url, LOCK)
            system.pipe_file(path, self._beat_of(0))
        if self._read_lock().get("id") != self._owner["id"]:  # a store without conditional writes
            raise ConfigError(f"{KEY}={self.remote.url} was just taken by another run.")

    def _is_alive(self, there: dict[str, Any]) -> bool:
        """Return whether the run of this lock is alive, by its process or a later heartbeat."""
        is_here = there.get("host") == self._owner["host"]
        if is_here and not is_running(int(there.get("pid") or 0)):
            return False
        print(
            f"{self.remote.url} was used by process {there.get('pid')} on {there.get('host')}; "
            f"waiting {LOCK_TIMEOUT_S:g} s to see whether that run is alive",
            flush=True,
        )
        until = time.monotonic() + LOCK_TIMEOUT_S
        while time.monotonic() < until:
            time.sleep(min(1.0, LOCK_TIMEOUT_S / 10))
            now = self._read_lock()
            if now != there:
                return bool(now)
        return False

    def _read_lock(self) -> dict[str, Any]:
        """Return the content of the lock; empty without a lock."""
        self.remote.system.invalidate_cache()
        try:
            lock = json.loads(self.remote.system.cat_file(self.remote.path(LOCK)))
        except (FileNotFoundError, ValueError):
            return {}
        return lock if isinstance(lock, dict) else {}

    def _beat_of(self, number: int) -> bytes:
        return json.dumps(self._owner | {"beat": number}).encode()

    def _beat(self) -> None:
        number = 0
        while not self._closed.wait(HEARTBEAT_S) and not self._taken_by:
            number += 1
            with suppress(Exception):  # the uploads report a store that fails
                self._keep_lock(number)

    def _keep_lock(self, number: int) -> None:
        """Change the lock, unless another run has taken it while the store did not respond."""
        there = self._read_lock()
        if there.get("id", self._owner["id"]) == self._owner["id"]:
            self.remote.system.pipe_file(self.remote.path(LOCK), self._beat_of(number))
            return
        self._taken_by = f"process {there.get('pid')} on {there.get('host')}"
        logger.warning(
            "%s was taken by %s; this run uploads no more", self.remote.url, self._taken_by
        )

    # ------------------------------------------------------------------- download and upload

    def _download(self) -> None:
        """Make the local copy like the store, except for files that were never uploaded."""
        with suppress(OSError, ValueError):
            self._record = dict(read_json_object(self.folder / RECORD))
        remote = self.remote.files()
        for name in self._record.keys() - remote.keys():  # another machine removed it
            if _stamp(self.folder / name) == self._record.pop(name)[0]:
                (self.folder / name).unlink(missing_ok=True)
        for name, info in remote.items():
            if name in NOT_UPLOADED:
                continue
            version, local = version_of(info), self.folder / name
            stamp = _stamp(local)
            if not _is_complete(name, remote.__contains__):
                self._record[name] = (None, version)  # removed by the first upload
                continue
            before, uploaded = self._record.get(name, (None, ""))
            is_step = re.match(STEP_FOLDER, name) is not None  # its files never change
            if stamp is None or uploaded != version or (is_step and before != stamp):
                self.remote.get(name, info, local)
                stamp = _stamp(local)
                before = stamp
            self._record[name] = (before, version)
        self._save_record()

    def _upload(self) -> None:
        """Upload changes in a loop, until the run closes the uploads."""
        num_last = 0
        while num_last < LAST_TRIES:
            num_last += self._closing.wait(SCAN_EVERY_S)
            if self._taken_by:
                return
            try:
                self._sync()
            except Exception as error:  # noqa: BLE001 - file systems raise anything
                if not self._error:
                    logger.warning(
                        "%s does not take uploads (%s). The run goes on, keeps its files in %s, "
                        "and tries again.",
                        *(self.remote.url, describe(error), self.folder),
                    )
                self._error = describe(error)
                self._closed.wait(SCAN_EVERY_S)
                continue
            if self._error:
                logger.warning("%s takes uploads again.", self.remote.url)
                self._error = ""
            if num_last:
                return

    def _sync(self) -> None:
        """Upload what has changed since the last call, and remove what is gone."""
        local = self._local_files()
        record = self._record
        new = [name for name, stamp in local.items() if record.get(name, (None,))[0] != stamp]
        removed = record.keys() - local.keys()
        if not new and not removed:
            return
        touched = {_marker_of(name) for name in (*new, *removed)} & record.keys()
        for name in sorted(removed | touched, key=lambda name: not name.endswith(MARKER)):
            with suppress(FileNotFoundError):
                self.remote.system.rm_file(self.remote.path(name))
            del record[name]
        new = sorted({*new, *(touched & local.keys())}, key=_order)
        uploaded = []
        try:
            for name in new:
                stamp = _stamp(self.folder / name)
                if stamp is None or (name.endswith(MARKER) and stamp != local[name]):
                    return  # the run has replaced the folder; the next call uploads the new one
                _put(self.remote, self.folder / name, name)
                uploaded.append((name, stamp))
        finally:
            versions = self.remote.files() if uploaded else {}
            record |= {
                name: (stamp, version_of(versions[name]))
                for name, stamp in uploaded
                if name in versions
            }
            self._save_record()

    def _local_files(self) -> dict[str, Stamp]:
        """Return the stamps of the files to upload; unfinished folders are left out."""
        # markers first: the files of a step are written before its checkpoint is committed
        markers = {
            path.relative_to(self.folder).as_posix() for path in self.folder.glob(f"*/{MARKER}")
        }
        stamps = {}
        for path in self.folder.rglob("*"):
            name = path.relative_to(self.folder).as_posix()
            is_draft = any(part.startswith(DRAFT) for part in path.parts)
            if name in NOT_UPLOADED or is_draft or not _is_complete(name, markers.__contains__):
                continue
            stamp = _stamp(path)
            if stamp is not None:
                stamps[name] = stamp
        return stamps

    def _save_record(self) -> None:
        write_atomic(self.folder / RECORD, json.dumps(self._record), to_disk=False)


def _stamp(path: Path) -> Stamp | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return [stat.st_size, stat.st_mtime_ns] if path.is_file() else None


def _marker_of(name: str) -> str:
    """Return the marker of the top folder of a file, whether or not it exists."""
    return f"{name.partition('/')[0]}/{MARKER}"


def _is_complete(name: str, exists: Callable[[str], bool]) -> bool:
    """Return False for a file of a checkpoint or model without its marker."""
    top, _, rest = name.partition("/")
    if not rest or not (top == MODEL or top.startswith("global_step_")):
        return True
    return exists(_marker_of(name)) and (top == MODEL or bool(re.fullmatch(STEP_FOLDER, top)))


def _order(name: str) -> tuple[int, str]:
    """Return the order of uploads: markers after all other files, then the newest step's number."""
    return (2 if name == LATEST else int(name == _marker_of(name)), name)
