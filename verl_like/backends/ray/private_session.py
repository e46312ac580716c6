"""What keeps a Ray cluster of this machine's own to its user.

    with private_session() as options:      # options for `ray.init`
        ray.init(**options)

Its session folder, which Ray opens to everyone, lies in one that nobody else can enter, and goes
when the process ends. The token that Ray asks for is in a file of the user's alone. Ports of
metrics, which no token guards, stay shut.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray

from verl_like.process.environment import environment
from verl_like.process.private_folder import private_folder

TOKEN_PLACES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
WITHOUT_METRICS = {
    "RAY_enable_metrics_collection": "0",
    # what every call did, for the dashboard's page of tasks: each process sends it every second
    "RAY_task_events_report_interval_ms": "0",
    # Ray has no switch for these two; a port that cannot be opened it only notes in its own log
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
LONGEST_PATH = 22
"""Of the session folders' parent: a Unix socket's path holds 107 characters, 85 of them Ray's."""


@contextlib.contextmanager
def private_session(with_metrics: bool) -> Iterator[dict[str, Any]]:
    """Within, the environment in which the cluster's processes start; what `ray.init` takes."""
    _guard_token()
    unset = {name: value for name, value in WITHOUT_METRICS.items() if name not in os.environ}
    folder = _session_folder()
    with environment({} if with_metrics else unset):
        yield {"_temp_dir": str(folder)}
    atexit.register(_shut_down, os.getpid())  # ahead of the folder's removal


def _guard_token() -> None:
    """Make the file with Ray's token, which Ray would let everyone read, unless it is elsewhere."""
    if any(name in os.environ for name in TOKEN_PLACES):
        return
    path = Path.home() / ".ray" / "auth_token"
    with contextlib.suppress(OSError):  # a home that cannot be written: Ray says so
        path.parent.mkdir(mode=0o700, exist_ok=True)
        if path.exists():
            path.chmod(0o600)
            return
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32))


def _session_folder() -> Path:
    """A new folder, removed when this process ends; those that killed runs left are removed now."""
    parent = private_folder(os.environ.get("RAY_TMPDIR"))
    if len(str(parent)) > LONGEST_PATH:
        parent = private_folder("/tmp")
    for left in parent.glob("ray-*-*"):
        if not _lives(left.name.split("-")[1]):
            shutil.rmtree(left, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"ray-{os.getpid()}-", dir=parent))
    atexit.register(_remove, folder, os.getpid())
    return folder


def _shut_down(owner: int) -> None:
    if os.getpid() == owner:  # not a process that was forked from it
        ray.shutdown(_exiting_interpreter=True)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


def _lives(pid: str) -> bool:
    return not pid.isdigit() or Path(f"/proc/{pid}").exists()
