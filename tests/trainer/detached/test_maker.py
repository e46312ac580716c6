"""A maker's two threads: one generates, one brings weights in the middle of a generation."""

from __future__ import annotations

import threading

import pytest

from tests.trainer.detached.stand_ins import make_buffer
from trainer.detached.activity import Activity
from trainer.detached.maker import Maker
from verl_like.batch.protocol import DataProto
from verl_like.errors import WorkerDiedError

WAIT_S = 20.0


class Group:
    """A rollout group that dies as weights of version 2 arrive, and can be started anew."""

    def __init__(self, restarts: bool) -> None:
        self.buffer = make_buffer(max_staleness=10)
        self.is_dead, self.restarts = False, restarts
        self.generating, self.goes_on = threading.Event(), threading.Event()
        self.taken: list[tuple[int, str]] = []
        self.took_again = threading.Event()
        self.lost: list[int] = []

    def generate(self, role: str, rows: DataProto, attempt: int) -> Group:
        self.generating.set()
        return self

    def wait(self) -> None:
        """Of a piece: it is being generated until the test says so."""
        assert self.goes_on.wait(WAIT_S)
        self.goes_on.clear()
        if self.is_dead:
            raise WorkerDiedError("the rollout is gone")

    def take_weights(self, maker: int) -> int:
        version = self.buffer.version
        if version == 2 and not self.lost:
            self.is_dead = True
            self.goes_on.set()
        if self.is_dead:
            raise WorkerDiedError("the rollout is gone")
        self.taken.append((version, threading.current_thread().name))
        if version == 3:
            self.took_again.set()
        return version

    def on_loss(self, maker: int, error: WorkerDiedError, num_lost: int) -> bool:
        self.lost.append(num_lost)
        self.is_dead = not self.restarts
        return self.restarts


def begun_maker(group: Group, **settings: bool) -> Maker:
    """A maker of that group, which generates its first piece."""
    maker = Maker(
        0, group.buffer, Activity(), group.generate, group.take_weights, group.on_loss, **settings
    )
    maker.start()
    assert group.generating.wait(WAIT_S)
    group.generating.clear()
    return maker


@pytest.fixture(params=[True, False], ids=["restart", "continue"])
def group(request: pytest.FixtureRequest) -> Group:
    return Group(restarts=request.param)


def test_weights_still_come_within_a_generation_after_a_restart(group: Group) -> None:
    buffer = group.buffer
    maker = begun_maker(group, weights_come_at_once=True)
    buffer.publish(2)
    if group.restarts:
        assert group.generating.wait(WAIT_S)
        buffer.publish(3)
        assert group.took_again.wait(WAIT_S)
        assert group.taken[-1] == (3, "maker 0 weights")
    else:
        maker._threads[0].join(WAIT_S)
    buffer.close()
    group.goes_on.set()
    maker.wait_for_end(WAIT_S)
    assert group.lost == [2]
    assert not any(thread.is_alive() for thread in maker._threads)


@pytest.mark.parametrize("weights_come_at_once", [True, False])
def test_no_weights_are_taken_while_others_than_the_policys_may_be_published(
    weights_come_at_once: bool,
) -> None:
    group = Group(restarts=True)
    group.lost = [0]  # version 2 kills nobody
    buffer = group.buffer
    maker = begun_maker(group, weights_come_at_once=weights_come_at_once)
    with maker.keeps_weights():
        buffer.publish(2)
        group.goes_on.set()
        assert not group.generating.wait(0.2)
        assert group.taken == [(1, "maker 0")]
    assert group.generating.wait(WAIT_S)
    assert group.taken[-1][0] == 2
    buffer.close()
    group.goes_on.set()
    maker.wait_for_end(WAIT_S)


def test_a_group_that_dies_in_a_call_of_the_trainers_is_looked_after(group: Group) -> None:
    buffer = group.buffer
    maker = begun_maker(group)
    threading.Timer(0.05, group.goes_on.set).start()
    with buffer.paused(WAIT_S):
        group.is_dead = True
        maker.look_after(WorkerDiedError("the rollout is gone"), maker.num_losses)
        assert group.lost == [0]
        assert maker.has_ended != group.restarts
        assert group.taken[1:] == [(1, "MainThread")] * group.restarts
    if group.restarts:
        assert group.generating.wait(WAIT_S)
        assert len(group.taken) == 2
    else:
        maker.wait_for_end(WAIT_S)
        assert not maker._threads[0].is_alive()
        assert buffer.in_flight() == []
    buffer.close()
    group.goes_on.set()
    maker.wait_for_end(WAIT_S)
