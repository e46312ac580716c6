"""Metrics next to a batch, or instead of one."""

from __future__ import annotations

import pytest

from tests.verl_like.calls.rows import GROUPS, assert_same, batch, worlds
from verl_like import DataProto, Dispatch, register
from verl_like.calls.future import WorkerFuture
from verl_like.calls.result import CallResult
from verl_like.errors import DispatchError


def test_metrics_are_in_rank_order_without_ranks_of_padding() -> None:
    result, metrics = GROUPS[3].with_metrics(batch(7))
    assert_same(result, batch(7))
    assert metrics["ranks"] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert metrics["first"] == [0.5]
    assert GROUPS[4].with_metrics(batch(2))[1]["ranks"] == [0, 0.5, 1, 1.5]
    assert GROUPS[4].metrics_alone(batch(2))["ranks"] == [0, 0.5, 1, 1.5]
    assert GROUPS[4].metrics_alone(batch(4))["sum"] == [0, 1, 2, 3]


def test_only_collecting_ranks_return_metrics() -> None:
    GROUPS[4].make_mesh(2).get()
    result, metrics = GROUPS[4].metrics_on_mesh(batch(5))
    assert_same(result, batch(5))
    assert metrics == {"rank": [1, 3]}


@worlds
def test_a_future_with_metrics_is_split_again_as_its_batch(world: int) -> None:
    future = GROUPS[3].with_metrics.remote(batch(7))
    again = GROUPS[world].with_metrics.remote(future)
    assert_same(again.get()[0], batch(7))
    assert len(again.get()[1]["sum"]) == world
    assert again.get()[1]["first"] == [0.5]


def test_mixed_results_and_tensors_as_metrics_are_rejected() -> None:
    with pytest.raises(
        DispatchError,
        match=r"metrics_on_the_first returned only metrics on rank\(s\) \[0\], and something else",
    ):
        GROUPS[2].metrics_on_the_first(batch(2))
    with pytest.raises(
        DispatchError,
        match=r"metrics_of_a_tensor on rank 0 returned metric 'lengths' as Tensor of shape \(2,\)",
    ):
        GROUPS[2].metrics_of_a_tensor(batch(4))


def test_results_are_checked_against_their_declaration() -> None:
    result = GROUPS[2].with_metrics(batch(4))
    assert isinstance(result, CallResult)
    assert GROUPS[2].with_metrics.remote(batch(4)).batch().batch["x"].tolist() == [0, 1, 2, 3]
    assert type(GROUPS[2].metrics_alone.remote(batch(4))) is WorkerFuture  # no batch to pass on

    words = "on rank 0 returned metrics alone, but is declared to return a batch"
    with pytest.raises(DispatchError, match=words):
        GROUPS[2].breaks_its_promise(batch(4))

    def counts(self: object, data: DataProto) -> int:
        raise AssertionError("it is rejected before the call")

    with pytest.raises(DispatchError, match="counts is declared to return int; a data-parallel"):
        register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)(counts)
