"""A maker's thread: weights between two takes, and groups that are lost."""

from __future__ import annotations

import threading

import pytest

from tests.trainer.detached.stand_ins import StandInGroup, asked_of, make_buffer
from trainer.detached.activity import Activity
from trainer.detached.maker import Maker, MakerCalls
from verl_like.batch.protocol import DataProto
from verl_like.errors import WorkerDiedError

WAIT_S = 20.0


class Group(StandInGroup):
    """A rollout group that dies as weights of version 2 arrive, and can be started anew."""

    def __init__(self, restarts: bool) -> None:
        super().__init__()
        self.buffer = make_buffer(max_staleness=10)
        self.is_dead, self.restarts = False, restarts
        self.generating, self.goes_on = threading.Event(), threading.Event()
        self.taken: list[int] = []
        self.lost: list[int] = []

    def add(self, rows: DataProto) -> None:
        super().add(rows)
        self.generating.set()

    def finished(self) -> DataProto | None:
        """A slice of time passes, or the piece is finished when the test says so."""
        if self.is_dead:
            raise WorkerDiedError("the rollout is gone")
        if not self.goes_on.wait(0.02):
            return None
        self.goes_on.clear()
        return super().finished()

    def take_weights(self) -> int:
        if self.buffer.version == 2 and not self.lost:
            self.is_dead = True
        if self.is_dead:
            raise WorkerDiedError("the rollout is gone")
        self.taken.append(self.buffer.version)
        return self.buffer.version

    def on_loss(self, error: WorkerDiedError, num_lost: int) -> bool:
        self.lost.append(num_lost)
        self.is_dead, self.running = not self.restarts, []
        return self.restarts


def begun_maker(group: Group, **settings: bool) -> Maker:
    """A maker of that group, which generates its first piece."""
    calls = MakerCalls(lambda: group, asked_of, group.take_weights, group.on_loss)
    maker = Maker(0, group.buffer, Activity(), calls, **settings)
    maker.start()
    assert group.generating.wait(WAIT_S)
    group.generating.clear()
    return maker


def end(group: Group, maker: Maker) -> None:
    assert group.buffer._failure is None
    group.buffer.close()
    maker.wait_for_end(WAIT_S)
    assert not maker._thread.is_alive()


@pytest.fixture(params=[True, False], ids=["restart", "continue"])
def group(request: pytest.FixtureRequest) -> Group:
    return Group(restarts=request.param)


def test_a_group_that_dies_within_a_piece_makes_it_again_with_newest_weights_or_ends(
    group: Group,
) -> None:
    maker = begun_maker(group, weights_at_once=True)
    group.buffer.publish(2)
    if group.restarts:
        assert group.generating.wait(WAIT_S)
        assert group.taken[-1] == 2
    else:
        maker.wait_for_end(WAIT_S)
    end(group, maker)
    assert group.lost == [2]


@pytest.mark.parametrize("weights_at_once", [True, False])
def test_no_weights_are_taken_while_others_than_the_policys_may_be_published(
    weights_at_once: bool,
) -> None:
    group = Group(restarts=True)
    group.lost = [0]  # version 2 kills nobody
    maker = begun_maker(group, weights_at_once=weights_at_once)
    with maker.keeps_group():
        group.buffer.publish(2)
        group.goes_on.set()
        assert not group.generating.wait(0.2)
        assert group.taken == [1]
    group.goes_on.set()
    assert group.generating.wait(WAIT_S)
    assert group.taken[-1] == 2
    end(group, maker)


def test_a_group_that_dies_while_the_trainer_validates_is_replaced_by_the_trainer(
    group: Group,
) -> None:
    maker = begun_maker(group)
    threading.Timer(0.05, group.goes_on.set).start()
    with group.buffer.paused(WAIT_S), maker.keeps_group():
        group.is_dead = True
        assert maker.replace(WorkerDiedError("the rollout is gone")) is group.restarts
        assert group.lost == [0]
        assert maker.has_ended != group.restarts
        if group.restarts:
            maker.take_weights()
    if group.restarts:
        assert group.generating.wait(WAIT_S)
        assert group.taken == [1, 1]
    else:
        maker.wait_for_end(WAIT_S)
        assert group.buffer.in_flight() == []
    end(group, maker)
