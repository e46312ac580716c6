"""A generator's thread: new weights between calls of `collect`, and lost groups."""

from __future__ import annotations

import threading

import pytest

from tests.trainer.async_training.stand_ins import (
    StandInGroup,
    columns_of,
    generator_of,
    make_buffer,
)
from tests.waiting import wait_until
from trainer.async_training.buffer import StalledError
from trainer.async_training.generators import Generator
from verl_like.batch.protocol import DataProto
from verl_like.errors import WorkerDiedError

WAIT_S = 20.0


class Group(StandInGroup):
    """A rollout group that dies when it gets version 2, and can be restarted."""

    def __init__(self, restarts: bool) -> None:
        super().__init__()
        self.buffer = make_buffer(max_staleness=10)
        self.is_dead, self.restarts = False, restarts
        self.generating, self.may_finish = threading.Event(), threading.Event()
        self.taken: list[int] = []
        self.lost: list[int] = []

    def add(self, rows: DataProto) -> None:
        super().add(rows)
        self.generating.set()

    def finished(self) -> DataProto | None:
        """Sleep for a slice of time, or finish the chunk when the test says so."""
        if self.is_dead:
            raise WorkerDiedError("the rollout is gone")
        if not self.may_finish.wait(0.02):
            return None
        self.may_finish.clear()
        return super().finished()

    def deliver(self, generator: int) -> int:
        if self.buffer.version == 2 and not self.lost:
            self.is_dead = True
        if self.is_dead:
            raise WorkerDiedError("the rollout is gone")
        self.taken.append(self.buffer.version)
        return self.buffer.version

    def losses(self, generator: int, error: WorkerDiedError, num_lost: int) -> bool:
        self.lost.append(num_lost)
        self.is_dead, self.running = not self.restarts, []
        return self.restarts


def begun_generator(group: Group, **settings: str) -> Generator:
    """Return a generator of that group, which generates its first chunk."""
    generator = generator_of(group.buffer, group, group.deliver, group.losses, **settings)
    generator.start()
    assert group.generating.wait(WAIT_S)
    group.generating.clear()
    return generator


def end(group: Group, generator: Generator) -> None:
    assert group.buffer._failure is None
    group.buffer.close()
    generator.wait_for_end(WAIT_S)
    assert not generator._thread.is_alive()


@pytest.fixture(params=[True, False], ids=["restart", "continue"])
def group(request: pytest.FixtureRequest) -> Group:
    return Group(restarts=request.param)


def test_a_lost_group_repeats_its_chunk_with_new_weights_or_ends(group: Group) -> None:
    generator = begun_generator(group, weight_update="immediate")
    group.buffer.publish(2)
    if group.restarts:
        assert group.generating.wait(WAIT_S)
        assert group.taken[-1] == 2
    else:
        generator.wait_for_end(WAIT_S)
    end(group, generator)
    assert group.lost == [2]


def test_a_generator_validates_with_new_weights_and_then_returns(group: Group) -> None:
    """If the generator dies meanwhile, its replacement generates the samples, or nobody does."""
    group.lost = [0]  # version 2 kills nobody
    generator = begun_generator(group)
    threading.Timer(0.05, group.may_finish.set).start()
    with group.buffer.paused(WAIT_S):
        group.buffer.publish(1)  # for example averaged weights
        group.is_dead = True
        rows = make_buffer(samples=1).chunks
        chunk = rows.offer(0)
        assert chunk is not None
        request = columns_of(rows.rows(chunk), 0)
        if group.restarts:
            threading.Timer(0.2, group.may_finish.set).start()
            assert len(group.buffer.validate(request, [0])) == len(request)
            assert group.taken == [1, 1]
        else:
            with pytest.raises(StalledError, match="no generator is left"):
                group.buffer.validate(request, [0])
        group.buffer.publish(1)
    if group.restarts:
        group.generating.clear()
        assert group.generating.wait(WAIT_S)
        assert group.taken == [1, 1, 1]
    end(group, generator)


@pytest.mark.parametrize(("chunk", "ranks"), [(None, [0, 2]), (1, [0])])
def test_a_generator_starts_its_share_of_a_batch(chunk: int | None, ranks: list[int]) -> None:
    settings = {"generators": 2, "trainers": 4, "chunk": chunk, "batch": 8, "max_staleness": 1}
    group = Group(restarts=False)
    group.buffer = make_buffer(**settings)
    generator = generator_of(group.buffer, group, group.deliver, group.losses, **settings)
    generator.start()
    wait_until(lambda: group.running)
    assert [chunk.rank for chunk in group.buffer.in_flight(0)] == ranks
    assert [len(rows) for rows in group.running] == [2 * len(ranks) if chunk is None else chunk]
    end(group, generator)
