"""The pieces of a call whose group has lost a rank while the others go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.verl_like.calls.rows import batch
from tests.verl_like.mortal_transport import NEVER, mortal_group
from verl_like import (
    DataProto,
    Dispatch,
    Worker,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.calls import answers
from verl_like.calls.survivors import (
    has_lost_ranks,
    pieces_there,
    surviving_pieces,
)
from verl_like.errors import DispatchError, WorkerDiedError


class Adder(Worker):
    """Consecutive ranks get the same piece, as many as are said; the first of them returns it."""

    def __init__(self, ranks_per_piece: int, failing: int | None = None):
        super().__init__()
        number, place = divmod(self.rank, ranks_per_piece)
        self.failing = failing
        self._register_dispatch_collect_info("rows", number, is_collect=place == 0)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn("rows"))
    def add(self, data: DataProto) -> DataProto:
        if self.rank == self.failing:
            raise KeyError("not this one")
        return DataProto.from_dict({"x": data.batch["x"] + 1})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def own_rank(self) -> int:
        return self.rank


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "AFTER_DEATH_S", 0.0)


def group_of(world: int, ranks_per_piece: int = 1, **more: Any) -> Any:
    return mortal_group(world, Adder, ranks_per_piece, **more)


def failed_call(group: Any, rows: int = 6) -> Any:
    future = group.add.remote(batch(rows))
    with pytest.raises(WorkerDiedError):
        future.get()
    assert has_lost_ranks(future)
    return future


def values(pieces: list[DataProto | None]) -> list[list[int] | None]:
    return [None if piece is None else piece.batch["x"].tolist() for piece in pieces]


def test_the_pieces_of_ranks_that_live_are_there_and_those_of_lost_ones_are_none() -> None:
    group = group_of(3)
    group.transport.dead, group.transport.slow = {1: 0}, {2: 5}
    future = failed_call(group)
    assert pieces_there(future) == {0}, "the others were not waited for when it failed"
    assert values(surviving_pieces(future)) == [[1, 2], None, [5, 6]]
    assert pieces_there(future) == {0, 2}


def test_pad_rows_are_left_out() -> None:
    group = group_of(3)
    group.transport.dead = {0: 0}
    assert values(surviving_pieces(failed_call(group, rows=5))) == [None, [3, 4], [5]]


def test_ranks_that_die_while_the_others_are_waited_for_are_lost_too() -> None:
    group = group_of(4)
    group.transport.dead, group.transport.slow = {1: 0, 2: 6, 3: 8}, {0: 7}
    assert values(surviving_pieces(failed_call(group, rows=4))) == [[1], None, None, None]


@pytest.mark.parametrize(
    ("dead", "slow", "found"),
    [
        ({1: 0}, {0: NEVER}, [None, [4, 5, 6]]),  # rank 0 waits in vain for its peer
        ({1: 3}, {2: 4}, [[1, 2, 3], [4, 5, 6]]),  # its peer died after rank 0 had answered
        ({2: 0}, {3: NEVER}, [[1, 2, 3], None]),
    ],
)
def test_a_piece_that_ranks_make_together_is_lost_with_one_unless_it_is_there(
    dead: dict[int, int], slow: dict[int, int], found: list[list[int] | None]
) -> None:
    group = group_of(4, ranks_per_piece=2)
    group.transport.dead, group.transport.slow = dead, slow
    assert values(surviving_pieces(failed_call(group))) == found


def test_every_call_is_in_the_timeline_once() -> None:
    group = group_of(3)
    group.transport.dead, group.transport.slow = {1: 0}, {2: 5}
    surviving_pieces(failed_call(group))
    assert [header.rank for header in group.transport.take_finished()] == [0, 2]


def test_a_piece_whose_payload_is_lost_with_its_machine_is_none() -> None:
    group = group_of(3)
    group.transport.dead, group.transport.payloads_lost = {1: 0}, {2}
    assert values(surviving_pieces(failed_call(group))) == [[1, 2], None, None]


def test_what_else_fails_among_those_that_live_is_raised() -> None:
    group = group_of(3, failing=2)
    group.transport.dead = {1: 0}
    with pytest.raises(KeyError, match="not this one"):
        surviving_pieces(failed_call(group))


def test_the_loss_of_another_group_is_no_loss_of_this_ones() -> None:
    group, other = group_of(2), group_of(1)
    other.transport.dead, group.transport.slow = {0: 0}, {0: NEVER, 1: NEVER}
    group.transport.companions = [other.transport]
    future = group.add.remote(batch(4))
    with pytest.raises(WorkerDiedError, match=r"idle during role.add"):
        future.get()
    assert not has_lost_ranks(future)
    with pytest.raises(WorkerDiedError, match=r"idle during role.add"):
        surviving_pieces(future)


def test_calls_that_return_no_batch_have_no_pieces() -> None:
    with pytest.raises(DispatchError, match=r"role.own_rank returns no batch"):
        surviving_pieces(group_of(2).own_rank.remote())


def test_numbers_of_pieces_go_by_the_mesh() -> None:
    future = group_of(4, ranks_per_piece=2).add.remote(batch(4))
    assert future.piece_numbers == [0, 0, 1, 1]
    assert torch.equal(future.get().batch["x"], torch.arange(4) + 1)
