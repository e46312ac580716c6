"""A cluster that loses its head, and a cluster whose daemon is frozen when its driver leaves.

`backends/ray/test_broken_cluster` runs this in a separate process.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import ray

from tests.forked_ray import ask_for_forks
from tests.programs import tell
from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Faulty
from tests.waiting import wait_until_ended
from trainer.run_folder.signals import StopSignals
from verl_like.backends.ray import cluster, connect
from verl_like.errors import WorkerDiedError


def daemon(kind: str) -> int:
    """Return the process of a daemon of this process's cluster."""
    (info,) = ray._private.worker._global_node.all_processes[kind]
    return int(info.process.pid)


def get_sigterm() -> dict[str, Any]:
    """Return the signals that our handler got, and the seconds until Ray's handler would abort."""
    heard: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    connect()
    os.kill(os.getpid(), signal.SIGTERM)
    return {"heard": heard, "aborts_in_s": signal.alarm(0)}


def lose_the_head() -> dict[str, Any]:
    """Return the error of a call whose cluster loses its GCS, and how long leaving takes."""
    with start("ray", {"faulty": (Faulty, ())}, [1]) as group:
        began, slow = time.monotonic(), group.sleeps(60)
        os.kill(daemon("gcs_server"), signal.SIGKILL)
        try:
            slow.get()
        except WorkerDiedError as error:
            facts = {"error": str(error), "error_s": time.monotonic() - began}
        began = time.monotonic()
        left = cluster.leave_if_broken()
    return facts | {"left": left, "left_s": time.monotonic() - began}


def end_with_a_frozen_daemon() -> dict[str, Any]:
    """Return how long the end takes, the session's folder, and the signal that the run noted."""
    with StopSignals() as stop, stop.deferred():
        connect()
        session = ray._private.worker._global_node.get_session_dir_path()
        with start("ray", {"faulty": (Faulty, ())}, [1]):
            frozen = daemon("raylet")
            os.kill(frozen, signal.SIGSTOP)
            began = time.monotonic()
        cluster._leave()
        ended_s = time.monotonic() - began
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
    wait_until_ended(frozen)
    return {"ended_s": ended_s, "session": session, "noted": int(stop.received)}


def wait_less(patch: pytest.MonkeyPatch) -> None:
    """Fork workers, and notice and leave a lost cluster sooner than in a run."""
    ask_for_forks(patch)
    # Ray's client ends this process so long after its head; a minute by default
    patch.setenv("RAY_gcs_rpc_server_reconnect_timeout_s", "3")
    patch.setattr(cluster, "ATTEMPT_EVERY_S", 0.3)
    patch.setattr(cluster, "RELEASE_S", 1.0)
    patch.setattr(cluster, "SHUTDOWN_S", 2.0)


if __name__ == "__main__":
    wait_less(pytest.MonkeyPatch())
    tell(get_sigterm() | lose_the_head() | end_with_a_frozen_daemon())
