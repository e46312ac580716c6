"""A rank that hangs or dies during a weight sync, on either side, is named before any deadline."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest

from tests.verl_like.groups import start
from tests.workers.stand_ins import PlainEngine, PlainTrainer
from tests.workers.weights.test_host_copy import Bring
from verl_like import Dispatch, Worker, register
from verl_like.backends import rpc
from verl_like.calls.deadlines import Deadlines
from verl_like.errors import VerlLikeError, WaitTimeoutError, WeightSyncError, WorkerDiedError
from workers.weights import channel, connection, sync
from workers.weights.sync import deliver_weights, publish_weights, sync_weights
from workers.weights.transfer import WeightReceiver, WeightSender

QUICK = Deadlines(call_s=4.0, grace_s=1.0)
NO_VOTE = "leaves without a vote"


class Fault:
    """Mixed into a worker: where and how it stops in its next sync."""

    rank: int

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare(self, rank: int, fault: str) -> None:
        """Let this rank stop at the vote; ranks wait only briefly for missing ones."""
        connection.JOIN_TIMEOUT = timedelta(seconds=2)
        if self.rank != rank:
            return
        if fault == "never connects":
            for wait in ("wait_for_sender", "wait_for_receivers"):
                setattr(connection, wait, lambda *_: time.sleep(60))
        vote = channel.Channel.all_agree

        def fail(own: Any, ok: bool) -> bool:
            if fault == NO_VOTE:
                self.group = own.connection.group  # the others do not see that it is closed
                return ok
            os.kill(os.getpid(), signal.SIGSTOP)
            return vote(own, ok)

        channel.Channel.all_agree = fail


class Actor(Fault, WeightSender, Worker):
    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainTrainer(0)


class Rollout(Fault, WeightReceiver, Worker):
    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainEngine(10)


@pytest.fixture
def groups(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """Two pools of two processes; the driver watches both while it waits for one, as in a run."""
    backend = request.param
    if backend == "ray":
        request.getfixturevalue("ray_session")
    monkeypatch.setattr(rpc, "STOPPED_S", 1.0)
    with ExitStack() as stack:
        pools = {
            role: stack.enter_context(start(backend, {role: (cls, ())}, [2], deadlines=QUICK))
            for role, cls in (("actor", Actor), ("rollout", Rollout))
        }
        transports = [pool.transport for pool in pools.values()]
        for transport, other in (transports, transports[::-1]):
            transport.companions = [other]
        yield pools


def fail_next_sync(groups: dict[str, Any], role: str, fault: str) -> None:
    """Let rank 0 of a role fail in its next sync."""
    for name, group in groups.items():
        group.prepare(0 if name == role else -1, fault)


VOTE_OF_RANK_1 = "(?=.*rollout rank 1 of 2).* did not finish within 4.0 s"
"""The sender waits in the same vote: either may be late first, both are named."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("groups", "fault", "error", "words"),
    [
        ("child", NO_VOTE, WaitTimeoutError, VOTE_OF_RANK_1),
        ("child", "freezes", WorkerDiedError, "rollout rank 0 of 2 .*has been stopped"),
        pytest.param("ray", NO_VOTE, WaitTimeoutError, VOTE_OF_RANK_1, marks=pytest.mark.ray),
    ],
    indirect=["groups"],
)
def test_a_rank_that_stops_at_the_vote_ends_the_sync(
    groups: dict[str, Any], fault: str, error: type[VerlLikeError], words: str
) -> None:
    fail_next_sync(groups, "rollout", fault)
    began = time.monotonic()
    with pytest.raises(error, match=f"(?s){words}"):
        sync_weights(groups["actor"], groups["rollout"], 1)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("groups", ["child"], indirect=True)
@pytest.mark.parametrize(
    ("role", "bring", "absent"),
    [
        ("actor", sync_weights, "the sender"),
        ("rollout", deliver_weights, "receiving rank 0"),
    ],
)
def test_a_rank_that_never_connects_is_named_before_any_deadline(
    groups: dict[str, Any], role: str, bring: Bring, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync, "GRACE_S", 0.5)
    fail_next_sync(groups, role, "never connects")
    publish_weights(groups["actor"], 1)
    began = time.monotonic()
    with pytest.raises(WeightSyncError, match=f"{absent} did not connect within 2 s") as caught:
        bring(groups["actor"], groups["rollout"], 1)
    assert f"{role} rank 0" in " ".join(caught.value.__notes__), "the rank that still runs"
    assert time.monotonic() - began < 20
