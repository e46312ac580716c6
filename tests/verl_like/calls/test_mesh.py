"""The mesh by which a call is split and collected."""

from __future__ import annotations

import threading

import pytest

from tests.verl_like.calls.rows import assert_same, batch
from tests.verl_like.fake_transport import FakeTransport, fake_group
from verl_like import (
    DataProto,
    Dispatch,
    Worker,
    WorkerGroup,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from verl_like.errors import DispatchError

FUSED: list[WorkerGroup] = []
ON_ROWS_MESH = make_nd_compute_dataproto_dispatch_fn("rows")


def collect_after_a_call_of_the_other_role(target, outputs):
    """Collect this call while a thread collects a call of another role of the group."""
    other = FUSED[0].other_on_rows.remote(batch(4))
    thread = threading.Thread(target=other.get)
    thread.start()
    thread.join(10)
    return ON_ROWS_MESH.collect_fn(target, outputs)


class OnRows(Worker):
    """Has a mesh "rows" in which `ranks_per_chunk` ranks get the same chunk."""

    def __init__(self, ranks_per_chunk: int):
        super().__init__()
        self.lay_out_again(ranks_per_chunk)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def lay_out_again(self, ranks_per_chunk: int):
        dp_rank, place = divmod(self.rank, ranks_per_chunk)
        self._register_dispatch_collect_info("rows", dp_rank, is_collect=place == 0)

    @register(dispatch_mode=ON_ROWS_MESH)
    def on_rows(self, data: DataProto):
        return DataProto.from_dict({"x": data.batch["x"], "rank": data.batch["x"] * 0 + self.rank})

    @register(
        dispatch_mode={
            "dispatch_fn": ON_ROWS_MESH.dispatch_fn,
            "collect_fn": collect_after_a_call_of_the_other_role,
        }
    )
    def collected_in_between(self, data: DataProto):
        return self.on_rows(data)


def fused_with_meshes(layouts: dict[str, int]) -> WorkerGroup:
    transport = FakeTransport({role: (OnRows, (n,), {}) for role, n in layouts.items()}, 4)
    return WorkerGroup(transport, dict.fromkeys(layouts, OnRows), prefixed=layouts)


def test_a_call_is_collected_by_its_own_role_during_another_call() -> None:
    fused = fused_with_meshes({"one": 2, "other": 1})
    FUSED[:] = [fused]
    result = fused.one_collected_in_between(batch(4))
    assert result.batch["x"].tolist() == [0, 1, 2, 3]
    assert result.batch["rank"].tolist() == [0, 0, 2, 2]
    assert fused.other_on_rows(batch(4)).batch["rank"].tolist() == [0, 1, 2, 3]


def test_a_call_is_collected_by_the_layout_of_its_dispatch() -> None:
    group = fused_with_meshes({"one": 2}).spawn(["one"])["one"]
    before = group.on_rows.remote(batch(4))
    group.lay_out_again(4)
    assert group.on_rows(batch(4)).batch["rank"].tolist() == [0, 0, 0, 0]
    assert before.get().batch["x"].tolist() == [0, 1, 2, 3]
    assert group.on_rows(batch(4)).batch["rank"].tolist() == [0, 0, 0, 0]


def test_only_one_rank_of_a_chunk_sends_its_result() -> None:
    group = fused_with_meshes({"one": 2}).spawn(["one"])["one"]
    future = group.on_rows.remote(batch(4))
    payloads = [group.transport.fetch(pending.payload) for pending in future.pending]
    assert [None if rows is None else len(rows) for rows in payloads] == [2, None, 2, None]
    headers = [group.transport.fetch(pending.header) for pending in future.pending]
    assert [header.rows for header in headers] == [2] * 4
    assert len(future.get()) == 4


def test_an_unregistered_mesh_is_rejected_by_name() -> None:
    group = fake_group(2)
    with pytest.raises(
        DispatchError,
        match=r"modes.on_mesh: rank\(s\) \[0, 1\] .* have not registered mesh 'actor'",
    ):
        group.on_mesh(batch(2))
    group.make_mesh(1, collects=False).get()
    with pytest.raises(
        DispatchError, match=r"mesh 'actor': data-parallel rank 0 of 2 needs exactly one rank"
    ):
        group.on_mesh(batch(2))


def test_a_mesh_is_known_once_its_registration_was_read() -> None:
    group = fake_group(4)
    registering = group.make_mesh(2)
    with pytest.raises(DispatchError, match="in a call whose result was read before this one"):
        group.on_mesh(batch(5))
    registering.get()
    assert_same(group.on_mesh(batch(5)), batch(5))


def test_a_mesh_can_be_registered_again_and_is_sent_only_then() -> None:
    group = fused_with_meshes({"one": 2}).spawn(["one"])["one"]
    group.on_rows(batch(4))
    assert [header.mesh_layout for header in group.transport.finished] == [None] * 4
    for ranks_per_chunk in (4, 2):  # the second is the layout of the start
        group.lay_out_again(ranks_per_chunk)
        assert len(group.on_rows.collecting_ranks()) == 4 // ranks_per_chunk
