"""A rank that dies before a sync begins to send: waiting ranks continue at once."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from datetime import timedelta

import pytest

from tests.verl_like.groups import start
from tests.workers.stand_ins import PlainEngine, PlainTrainer
from tests.workers.weights.test_host_copy import Bring, deliver
from verl_like import Dispatch, Worker, register
from verl_like.errors import WeightSyncError, WorkerDiedError
from verl_like.process.info import new_secret
from verl_like.process.store import SignedStore
from workers.weights import connection
from workers.weights.connection import (
    Address,
    give_up,
    open_weight_store,
    wait_for_receivers,
)
from workers.weights.sync import SyncReport, publish_weights, sync_weights
from workers.weights.transfer import WeightReceiver, WeightSender

SOON_S = 10.0
"""Half of what ranks wait for one that does not come; on an idle machine it takes 2 s."""


class Actor(WeightSender, Worker):
    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainTrainer(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reply(self) -> int:
        """Reply after the current send."""
        return self.rank


class DiesFirst(WeightReceiver, Worker):
    """Its rank 0 dies; the other one waits for the sender."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainEngine(10)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        if self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().receive_weights(address, version)


class DiesAsItForms(DiesFirst):
    """Its rank 0 dies after it has joined: before or just after it announces its address."""

    def __init__(self, writes_address: bool) -> None:
        super().__init__()
        self._writes_address = writes_address

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        if self.rank == 0:
            die_at_the_second_write(self._writes_address)
        return WeightReceiver.receive_weights(self, address, version)


def die_at_the_second_write(is_written: bool) -> None:
    """Die at the second write: a rank first writes that it has joined, then its address."""
    write, keys = SignedStore.set, list[str]()

    def write_or_die(store: SignedStore, key: str, value: str | bytes) -> None:
        keys.append(key)
        if len(keys) == 1 or is_written:
            write(store, key, value)
        if len(keys) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    SignedStore.set = write_or_die


@pytest.mark.parametrize(
    ("bring", "num_actors", "cls", "arguments"),
    [
        (deliver, 2, DiesFirst, ()),
        (sync_weights, 1, DiesAsItForms, (True,)),
        (deliver, 1, DiesAsItForms, (False,)),
    ],
)
def test_no_rank_waits_for_one_that_died_before_the_group_formed(
    bring: Bring, num_actors: int, cls: type[DiesFirst], arguments: tuple[bool, ...]
) -> None:
    with ExitStack() as stack:
        actor = stack.enter_context(start("local", {"actor": (Actor, ())}, [num_actors]))
        rollout = stack.enter_context(start("local", {"rollout": (cls, arguments)}, [2]))
        began = time.monotonic()
        with pytest.raises(WorkerDiedError, match="rollout rank 0 of 2"):
            bring(actor, rollout, 1)
        assert actor.reply() == list(range(num_actors))
        for version in (2, 3, 4):  # publishing waits for a version that is still read
            publish_weights(actor, version)
        assert time.monotonic() - began < SOON_S


def test_every_rank_that_waits_to_the_end_names_the_missing_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "JOIN_TIMEOUT", timedelta(seconds=0.2))
    store, place = open_weight_store()
    part = Address(place, 1, new_secret()).part_of(store)
    part.set("joined/0", "{}")
    part.set("joined/1", "{}")
    give_up(part, 2)
    with pytest.raises(WeightSyncError, match="stopped, because another rank failed"):
        wait_for_receivers(part, 2)
    late = Address(place, 2, new_secret()).part_of(store)
    late.set("joined/1", "{}")
    wait = late.wait

    def wait_in_vain(keys: list[str], timeout: timedelta) -> None:
        try:
            wait(keys, timeout)
        finally:
            give_up(late, 2)  # the other ranks gave up a little earlier

    monkeypatch.setattr(late, "wait", wait_in_vain)
    with pytest.raises(WeightSyncError, match="receiving rank 1 did not connect within"):
        wait_for_receivers(late, 2)
