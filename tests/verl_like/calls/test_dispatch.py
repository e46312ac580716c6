"""Every dispatch mode splits arguments and collects results; no processes are started."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verl_like.calls.rows import GROUPS, assert_same, batch, worlds
from tests.verl_like.fake_transport import FakeTransport, fake_group
from verl_like import (
    DataProto,
    Dispatch,
    Execute,
    PerRank,
    Worker,
    WorkerGroup,
    register,
    register_dispatch_mode,
    update_dispatch_mode,
)
from verl_like.errors import BatchError, DispatchError


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 17),
    st.integers(1, 4),
    st.sampled_from(["echo", "echo_later", "echo_first", "echo_async"]),
)
def test_collect_undoes_dispatch(rows: int, world: int, method: str) -> None:
    data = batch(rows)
    result = getattr(GROUPS[world], method)(data)
    result = result.get() if method == "echo_later" else result
    assert_same(result, data)
    assert_same(data, batch(rows), but=())
    assert result.shard is None


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 17),
    st.sampled_from([(2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (3, 3)]),
    st.booleans(),
)
def test_collect_undoes_dispatch_on_a_mesh(rows: int, shape: tuple[int, int], later: bool) -> None:
    world, tensor_parallel = shape
    group = GROUPS[world]
    group.make_mesh(tensor_parallel).get()
    data = batch(rows)
    result = group.on_mesh_later(data).get() if later else group.on_mesh(data)
    assert_same(result, data)
    last_ranks = range(tensor_parallel - 1, world, tensor_parallel)
    assert set(result.batch["rank"].tolist()) <= set(last_ranks)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 17), st.integers(1, 4), st.integers(1, 4))
def test_a_future_keeps_all_rows_at_a_group_of_any_size(rows: int, first: int, second: int) -> None:
    future = GROUPS[first].echo.remote(batch(rows))
    assert_same(GROUPS[second].same(future), future.get(), but=())


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 17), st.integers(1, 4))
def test_other_modes_keep_every_row(rows: int, world: int) -> None:
    group, data = GROUPS[world], batch(rows)
    assert sum(group.metric(data)) == data.batch["x"].sum()
    chunks = group.chunks(data)
    assert len(chunks) == world
    assert_same(DataProto.concat([p for p in chunks if len(p)]), data)
    assert group.describe(data) == [f"{rows} rows"] * world
    assert_same(group.twice(data), data.repeat(2))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.integers(), max_size=4) | st.text(max_size=4) | st.tuples(st.integers()),
)
def test_a_plain_value_of_any_length_is_broadcast(world: int, value: object) -> None:
    group = GROUPS[world]
    assert group.one_to_all(value) == [(rank, value) for rank in range(world)]
    assert group.all_to_all(value) == [(rank, value, None) for rank in range(world)]
    assert (
        group.all_to_first(value)
        == group.rank_zero(value)
        == group.one_to_first(value)
        == (0, value)
    )
    assert group.execute_func_rank_zero(lambda v: v, value) == value


@worlds
def test_scatter_gives_each_worker_its_element(world: int) -> None:
    group, letters = GROUPS[world], "abcd"[:world]
    assert group.all_to_all(PerRank(letters), other=7) == [(r, c, 7) for r, c in enumerate(letters)]
    assert group.dp_compute([*letters]) == [(r, c) for r, c in enumerate(letters)]
    assert group.dp_compute_first(["only"]) == (0, "only")


def test_a_list_of_the_wrong_length_is_rejected_by_name() -> None:
    with pytest.raises(
        DispatchError,
        match=r"modes.dp_compute: argument 'value' .* each of 3 workers, got list of 2",
    ):
        GROUPS[3].dp_compute([1, 2])
    with pytest.raises(
        DispatchError, match=r"modes.all_to_all: argument 'other' .* got PerRank of 1"
    ):
        GROUPS[3].all_to_all(0, other=PerRank([1]))


def test_an_argument_that_is_no_batch_is_rejected_by_name() -> None:
    with pytest.raises(
        DispatchError, match=r"modes.add: argument 'more' must be a DataProto .* got dict"
    ):
        GROUPS[2].add(batch(2), {"x": 1})
    with pytest.raises(
        DispatchError, match=r"modes.add: argument 'more' must be a DataProto .* got NoneType"
    ):
        GROUPS[2].add(batch(2), more=None)


def test_a_batch_without_rows_is_rejected() -> None:
    with pytest.raises(BatchError, match="modes.echo: argument 'data' has no rows"):
        GROUPS[2].echo(batch(1)[:0])


@worlds
def test_a_result_that_is_no_batch_is_rejected(world: int) -> None:
    with pytest.raises(
        DispatchError,
        match=r"modes.returns_seven returned int on rank 0; .* must return a DataProto",
    ):
        GROUPS[world].returns_seven(batch(2))
    future = GROUPS[world].returns_seven.remote(batch(4))
    with pytest.raises(DispatchError, match="modes.returns_seven returned int"):
        GROUPS[2].same(future)


def test_a_padded_result_of_another_length_is_rejected() -> None:
    with pytest.raises(
        DispatchError,
        match=r"modes.loses_rows on rank 1 returned 1 rows for 2 \(1 of them padding\)",
    ):
        GROUPS[2].loses_rows(batch(3))
    assert len(GROUPS[2].loses_rows(batch(4))) == 2


def test_shards_have_the_position_and_number_of_real_rows() -> None:
    shards = GROUPS[3].shards(batch(7)).meta_info["metrics"]["shard"]
    assert shards == [(0, 0, 3, 7), (1, 3, 3, 7), (2, 6, 1, 7)]
    assert GROUPS[4].shards(batch(2)).meta_info["metrics"]["shard"] == [(0, 0, 1, 2), (1, 1, 1, 2)]


def test_writes_of_a_worker_into_its_batch_are_private() -> None:
    data = batch(4)
    future = GROUPS[2].same.remote(data)
    assert GROUPS[2].overwrite(future).batch["x"].tolist() == [-1] * 4
    assert_same(future.get(), batch(4))
    assert_same(data, batch(4))


def test_a_future_arrives_as_its_result() -> None:
    group = GROUPS[2]
    assert group.describe(group.one_to_all.remote(3)) == ["list [(0, 3), (1, 3)]"] * 2
    assert group.describe(group.rank_zero.remote(3)) == ["tuple (0, 3)"] * 2
    assert group.describe(group.letters.remote("ab")) == ["str a-bb"] * 2
    assert group.describe(group.same.remote(batch(3))) == ["3 rows"] * 2


def test_users_can_define_dispatch_modes() -> None:
    assert GROUPS[3].letters("abc") == "a-bb-ccc"
    with pytest.raises(
        DispatchError, match=r"modes.letters: the dispatch function must return .* per worker \(4\)"
    ):
        GROUPS[4].letters("abc")
    with pytest.raises(DispatchError, match="missing: collect_fn"):
        register(dispatch_mode={"dispatch_fn": len})

    def give_rank(group, *_):
        return (list(range(group.world_size)),), {}

    register_dispatch_mode("give_rank", give_rank, lambda group, outputs: sum(outputs))
    try:

        class Ranked(Worker):
            @register(dispatch_mode=Dispatch.GIVE_RANK)
            def f(self, x):
                return x

        assert fake_group(4, Ranked).f("ignored") == 6
        with pytest.raises(DispatchError, match="already exists"):
            register_dispatch_mode("GIVE_RANK", give_rank, max)
        update_dispatch_mode(Dispatch.GIVE_RANK, give_rank, lambda group, outputs: max(outputs))
        assert fake_group(4, Ranked).f("ignored") == 3
    finally:
        Dispatch.remove("give_rank")


def test_dispatch_modes_are_looked_up_and_pickled_by_name() -> None:
    assert Dispatch.from_name("one_to_all") is Dispatch.ONE_TO_ALL
    assert pickle.loads(pickle.dumps(Execute.RANK_ZERO)) is Execute.RANK_ZERO
    with pytest.raises(
        DispatchError, match=r"unknown Dispatch 'ONE_TO_AL'. Did you mean 'ONE_TO_ALL'"
    ):
        Dispatch.from_name("ONE_TO_AL")
    with pytest.raises(DispatchError, match="unknown dispatch mode 'TWO_TO_ALL'"):
        register(dispatch_mode="TWO_TO_ALL")


def test_a_role_lacks_methods_of_a_role_with_a_longer_name() -> None:
    class Rollout(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def rollout_step(self):
            return "rollout"

    class Actor(Worker):
        @register(dispatch_mode=Dispatch.ONE_TO_ALL)
        def step(self):
            return "actor"

    roles = {"actor": Actor, "actor_rollout": Rollout}
    fused = WorkerGroup(
        FakeTransport({r: (c, (), {}) for r, c in roles.items()}, 2), roles, prefixed=roles
    )
    groups = fused.spawn(roles)
    assert fused.actor_step() == groups["actor"].step() == ["actor"] * 2
    assert (
        fused.actor_rollout_rollout_step()
        == groups["actor_rollout"].rollout_step()
        == ["rollout"] * 2
    )
    assert not hasattr(groups["actor"], "rollout_step")
    assert not hasattr(groups["actor"], "rollout_rollout_step")
    assert not hasattr(groups["actor_rollout"], "step")


def test_methods_of_two_roles_cannot_have_the_same_name() -> None:
    class Step(Worker):
        @register()
        def step(self): ...

    class RolloutStep(Worker):
        @register()
        def rollout_step(self): ...

    roles = {"actor": RolloutStep, "actor_rollout": Step}
    with pytest.raises(
        DispatchError, match="actor_rollout.step and actor.rollout_step would both be"
    ):
        WorkerGroup(
            FakeTransport({r: (c, (), {}) for r, c in roles.items()}, 1), roles, prefixed=roles
        )
