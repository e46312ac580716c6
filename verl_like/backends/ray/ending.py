"""Leaving a Ray cluster in bounded time, though its daemons be frozen or gone.

Ray itself waits for minutes then. A cluster that this process has started ends with it, at once.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import ray

RELEASE_S = 5.0
"""Of giving places back: a cluster that does not answer has nothing to give them to."""
SHUTDOWN_S = 10.0
"""Of Ray's own end; where it takes longer, its daemons are killed."""
DAEMONS = ("gcs_server", "raylet")
"""Of a head and of a node, without which nothing is computed."""
logger = logging.getLogger(__name__)


def within(seconds: float, work: Callable[[], None], what: str) -> bool:
    """Whether it has ended in time; it goes on beside us otherwise, and what fails is logged."""

    def attempt() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - at a run's end, which has its own error to tell
            logger.warning("%s failed: %s", what, error)

    thread = threading.Thread(target=attempt, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        logger.warning("%s did not end within %.0f s, and is left alone", what, seconds)
    return not thread.is_alive()


def end_in_time_at_exit() -> None:
    """Have this process leave Ray before its own exit handler does, in bounded time."""
    atexit.unregister(_leave)
    atexit.register(_leave)


def leave_if_broken() -> bool:
    """Leave a cluster whose head or nodes do not answer: the next connection finds another.

    Gives whether there is none to go on in.
    """
    nodes: list[dict[str, Any]] = []
    if ray.is_initialized() and (
        _has_lost_own_daemon()
        or not within(RELEASE_S, lambda: nodes.extend(ray.nodes()), "asking the cluster's nodes")
        or not any(node["Alive"] for node in nodes)
    ):
        _leave()
    return not ray.is_initialized()


def _has_lost_own_daemon() -> bool:
    """Whether a cluster of this process's own has lost its head or its node: none comes back."""
    processes = _own_processes()
    dead = [processes[kind][0].process.poll() for kind in DAEMONS if kind in processes]
    return any(status is not None for status in dead)


def _leave() -> None:
    if not ray.is_initialized():
        return
    atexit.unregister(ray.shutdown)
    daemons = _own_daemons()
    if not within(SHUTDOWN_S, ray.shutdown, "leaving Ray"):
        for pid in daemons:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _own_daemons() -> list[int]:
    return [each.process.pid for kind in _own_processes().values() for each in kind]


def _own_processes() -> dict[str, Any]:
    """Kind -> those of a cluster that this process has started; of one that it joined none."""
    node = ray._private.worker._global_node
    if node is None or not node.is_head():
        return {}
    return dict(node.all_processes)
