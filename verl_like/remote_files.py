"""Files in object stores and other file systems that `fsspec` knows: `s3://bucket/folder/file`.

`local_copy` downloads once per node and version. fsspec is imported only for paths with a scheme,
and the package of a scheme, such as s3fs, only for its paths.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError, VerlLikeError, nearest
from verl_like.files import cache_folder, draft_path

logger = logging.getLogger(__name__)

NOT_LISTED = ("http", "https", "ftp")
"""Schemes whose servers have no folders, or no writing, that can be relied upon."""


class RemoteFolder:
    """A folder or file of a remote file system; `key` names it in errors.

    Example:

        remote = RemoteFolder("s3://bucket/model", "model.path")
        remote.files()                         # {"config.json": File(...), ...}
        remote.get("config.json", Path("config.json"))
    """

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url.rstrip("/"), key
        scheme = url.partition("://")[0]
        if scheme in NOT_LISTED:
            raise ConfigError(
                f"{key}={url}: {scheme}:// is not supported, because such servers do not list "
                "folders. Download the files, or use the address of an object store (s3://...)."
            )
        from fsspec import available_protocols
        from fsspec.core import url_to_fs

        known = available_protocols()
        if scheme not in known:
            raise ConfigError(
                f"{key}={url}: fsspec knows no scheme {scheme}://.{nearest(scheme, known)} Use "
                "s3://, gs://, abfs:// or another one of its schemes."
            )
        if not self.url.partition("://")[2]:
            raise ConfigError(f"{key}={url}: it names no bucket or folder. Add its name.")
        try:
            with self.naming():
                self.system, root = url_to_fs(self.url)
        except ImportError as error:
            raise ConfigError(f"{key}={url}: {error}, into the environment of this run.") from error
        if getattr(self.system, "async_impl", False):
            self.system.loop.set_exception_handler(log_for_debugging)
        if hasattr(self.system, "auto_mkdir"):  # file systems with folders
            self.system.auto_mkdir = True
        self.root: str = root.rstrip("/")
        self.parts: tuple[str, ...] = (scheme, *(part for part in self.root.split("/") if part))
        if ".." in self.parts:
            raise ConfigError(f"{key}={url}: a remote path has no '..'. Write the whole path.")

    def path(self, name: str) -> str:
        """Return the path of a file of this folder for the file system."""
        return f"{self.root}/{name}" if name else self.root

    def files(self) -> dict[str, dict[str, Any]]:
        """Return what the file system tells about each file below the folder, by relative name.

        If this is a file, its name is "".
        """
        self.system.invalidate_cache()
        infos = self.system.find(self.root, detail=True)
        names = {path: path[len(self.root) :].lstrip("/") for path in infos}
        outside = [path for path, name in names.items() if ".." in Path(name).parts]
        if outside:
            raise ConfigError(f"{self.key}={self.url}: it has the unsafe name {outside[0]!r}.")
        return {
            name: infos[path] or self.system.info(path)
            for path, name in sorted(names.items())
            if not path.endswith("/")
        }

    def get(self, name: str, info: dict[str, Any], to: Path) -> None:
        """Download a file: it appears whole or not at all."""
        to.parent.mkdir(parents=True, exist_ok=True)
        draft = draft_path(to)
        try:
            self.system.get_file(self.path(name), str(draft))
            size = draft.stat().st_size
            if size != info.get("size", size):
                raise OSError(f"only {size:,} of {info['size']:,} bytes of {name} arrived")
            draft.replace(to)
        finally:
            draft.unlink(missing_ok=True)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Turn the errors of file systems, which have many types, into one with the key."""
        try:
            yield
        except (VerlLikeError, ImportError):
            raise
        except Exception as error:
            raise ConfigError(
                f"{self.key}={self.url} is not accessible: {describe(error)}. Check the name, the "
                "network, and the credentials in the environment of this process."
            ) from error


def log_for_debugging(loop: Any, context: dict[str, Any]) -> None:
    """Log an error of a transfer that nobody waits for, because its call has failed already."""
    logger.debug("%s: %s", context["message"], context.get("exception"))


def describe(error: BaseException) -> str:
    """Return an error of a file system as part of a sentence."""
    text = " ".join(str(error).split()).rstrip(".")[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def version_of(info: dict[str, Any]) -> str:
    """Return a digest that changes with the file: of its size, ETag, time of change and the like.

    File systems use different names for these, so the digest covers everything that they tell.
    """
    text = repr(sorted((key, str(value)) for key, value in info.items()))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def remote_version(url: str, key: str) -> str:
    """Return a digest that changes with any file at this path, without reading the files."""
    remote = RemoteFolder(url, key)
    with remote.naming():
        return _version(remote.files())


def _version(files: dict[str, dict[str, Any]]) -> str:
    return version_of({name: version_of(info) for name, info in files.items()})


def local_copy(url: str, key: str, is_needed: Callable[[str], bool] = lambda name: True) -> Path:
    """Return the local copy of a remote file or folder, downloaded once per node and version.

    Only files whose relative name passes `is_needed` are sure to be there. The call returns when
    all of these are there; other processes wait for the first one.
    """
    remote = RemoteFolder(url, key)
    with remote.naming():
        files = remote.files()
        if not files:
            raise ConfigError(f"{key}={url}: there is no such file or folder.")
        *parents, name = remote.parts
        folder = cache_folder("remote").joinpath(*parents, _version(files))
        folder.mkdir(parents=True, exist_ok=True)
        copy: Path = folder / name
        with folder.with_name(f"{folder.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            for file, info in files.items():
                to = copy / file if file else copy
                if (not file or is_needed(file)) and not to.is_file():
                    remote.get(file, info, to)
        return copy
