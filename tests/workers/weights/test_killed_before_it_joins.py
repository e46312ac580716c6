"""A rank that dies before a sync has begun: whoever waits for it there goes on at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.verl_like.groups import start
from tests.workers.stand_ins import PlainEngine, PlainTrainer
from verl_like import Dispatch, Worker, register
from verl_like.errors import WorkerDiedError
from workers.weights.delivery import WeightPublisher, deliver_weights, publish_weights
from workers.weights.sides import SyncReport
from workers.weights.sync import WeightReceiver, sync_weights

SOON_S = 5.0
"""A quarter of what ranks wait for one that does not come."""
Bring = Callable[[Any, Any, int], object]


class Actor(WeightPublisher, Worker):
    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainTrainer(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answer(self) -> int:
        """In its turn: after what is being sent."""
        return self.rank


class DiesFirst(WeightReceiver, Worker):
    """Its rank 0 does; the other one waits for the sender."""

    def __init__(self) -> None:
        super().__init__()
        self.engine = PlainEngine(10)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        if self.rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().receive_weights(address, version)


@pytest.fixture(params=[1, 2], ids=["actor of the driver", "actor of two"])
def groups(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    with ExitStack() as stack:
        yield (
            stack.enter_context(start("local", {"actor": (Actor, ())}, [request.param])),
            stack.enter_context(start("local", {"rollout": (DiesFirst, ())}, [2])),
        )


def deliver(actor: Any, rollout: Any, version: int) -> object:
    publish_weights(actor, version)
    return deliver_weights(actor, rollout, version)


@pytest.mark.parametrize("bring", [sync_weights, deliver], ids=["sync", "delivery"])
def test_nobody_waits_for_a_rank_that_died_before_it_came(
    groups: tuple[Any, Any], bring: Bring
) -> None:
    actor, rollout = groups
    began = time.monotonic()
    with pytest.raises(WorkerDiedError, match="rollout rank 0 of 2"):
        bring(actor, rollout, 1)
    assert actor.answer() == list(range(actor.world_size))
    for version in (2, 3, 4):  # a version that is still read would be waited for
        publish_weights(actor, version)
    assert time.monotonic() - began < SOON_S
