"""While the driver waits for one pool, failures of another one are noticed."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.verl_like.groups import start
from tests.verl_like.sample_workers import Faulty
from tests.waiting import wait_until
from verl_like.backends import rpc
from verl_like.errors import WorkerDiedError


@pytest.mark.long
@pytest.mark.parametrize("backend", ["child", pytest.param("ray", marks=pytest.mark.ray)])
def test_a_dead_or_stopped_idle_worker_ends_the_wait_for_another(
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    options: dict[str, Any] = {"own_processes": True}
    if backend == "ray":
        request.getfixturevalue("ray_session")
        options = {}
    roles = {"faulty": (Faulty, ())}
    with (
        start(backend, roles, [1], **options) as busy,
        start(backend, roles, [1], **options) as idle,
    ):
        busy.transport.companions = [idle.transport]
        pid = idle.transport.pid_here(0)
        monkeypatch.setattr(rpc, "STOPPED_S", 0.5)
        os.kill(pid, signal.SIGSTOP)
        idle.transport.is_replaceable = True
        assert busy.sleeps(4).get() == [0], "the next call of the stopped worker replaces it"
        assert caplog.text.count("It will be replaced on its next use.") == 1

        idle.transport.is_replaceable = False
        began, slow = time.monotonic(), busy.sleeps(60)
        with pytest.raises(WorkerDiedError, match="idle during faulty.sleeps: .*kill -CONT"):
            slow.get()

        os.kill(pid, signal.SIGCONT)
        assert idle.transport.can_kill
        idle.transport.kill(0)
        wait_until(lambda: idle.transport.lost([0]))
        with pytest.raises(
            WorkerDiedError, match="idle during rewards: .*(SIGKILL|it ended without)"
        ):
            idle.transport.check_idle("rewards")
        again = busy.sleeps(60)
        with pytest.raises(
            WorkerDiedError, match="idle during faulty.sleeps: .*(SIGKILL|it ended without)"
        ):
            again.get()
        assert time.monotonic() - began < 20


def test_a_worker_that_is_stopped_during_a_call_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rpc, "STOPPED_S", 0.5)
    with start("child", {"faulty": (Faulty, ())}, [1], own_processes=True) as group:
        slow = group.sleeps(60)
        os.kill(group.transport.pid_here(0), signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match="faulty.sleeps, .* 0 .*has been stopped"):
            slow.get()
        assert time.monotonic() - began < 20
    assert time.monotonic() - began < 20, "the shutdown does not wait for it either"
