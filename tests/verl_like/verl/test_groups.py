"""The parts of a group that drivers and workers written for verl use, on every backend."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.verl_like.groups import start
from tests.verl_like.hybrid_workers import Hybrid
from verl_like import (
    DataProto,
    Dispatch,
    PerRank,
    Worker,
    create_colocated_worker_raw_cls,
)
from verl_like.calls.group import ClassWithInitArgs
from verl_like.errors import DispatchError, PlacementError
from verl_like.verl.groups import scatter_lists

BACKENDS = [("inline", 1), ("child", 2), pytest.param(("ray", 2), marks=pytest.mark.ray)]


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda p: p[0])
def group(request: pytest.FixtureRequest) -> Iterator[Any]:
    backend, size = request.param
    options = {} if backend == "inline" else {"worker_env": {"MINE": "7"}}
    if backend == "ray":
        request.getfixturevalue("ray_session")
    with start(backend, {"hybrid": (Hybrid, ())}, [size], **options) as group:
        group.init_model()
        yield group


def sample(rows: int = 5) -> TensorDict:
    """Return a column of every kind; row i of `ids` has i + 1 numbers."""
    ids = torch.nested.as_nested_tensor(
        [torch.full((n + 1,), n) for n in range(rows)], layout=torch.jagged
    )
    columns = {"x": torch.arange(rows), "ids": ids}
    uid = NonTensorStack(*(NonTensorData(f"u{row}") for row in range(rows)))
    others = {"uid": uid, "top_p": NonTensorData(0.5, batch_size=[rows])}
    return TensorDict({**columns, **others}, batch_size=[rows])


def test_methods_can_be_called_by_name(group) -> None:
    ranks = range(group.world_size)
    assert group.execute_all_sync("adder_plain", 3, y=4) == [(rank, 3, 4) for rank in ranks]
    future = group.execute_all_async("adder_plain", [1, 2])
    assert future.get() == [(rank, [1, 2], 0) for rank in ranks]
    assert group.execute_rank_zero_sync("adder_plain", 3) == (0, 3, 0)
    assert group.execute_rank_zero_async("both", 3).get() == 30
    element = PerRank([10 * rank for rank in ranks])
    assert group.execute_all_sync("adder_plain", element) == [(r, 10 * r, 0) for r in ranks]


def test_an_unknown_method_name_is_rejected(group) -> None:
    with pytest.raises(DispatchError, match=r"no method 'adder_plan'. Did you mean 'adder_plain'"):
        group.execute_all_sync("adder_plan")


def test_an_unregistered_method_is_no_attribute_of_the_group(group) -> None:
    with pytest.raises(AttributeError, match="Adder has the method 'plain', but it isn't register"):
        _ = group.adder_plain
    with pytest.raises(AttributeError, match="no attribute 'adder_plan'. Did you mean 'adder_pla"):
        _ = group.adder_plan
    assert not hasattr(group, "__wrapped__")


def test_roles_of_a_process_can_call_each_other(group) -> None:
    ranks = range(group.world_size)
    assert group.both(1) == [10 * (1 + rank) for rank in ranks]
    assert group.adder_add(1) == [1 + rank for rank in ranks]
    roles = group.spawn(["adder", "scaler"])
    assert roles["scaler"].scale(2) == [20 for _ in ranks]
    assert group.shares_processes_with(roles["adder"])


def test_the_environment_has_the_ranks_of_a_worker(group) -> None:
    size = group.world_size
    for name in ("LOCAL_RANK", "RAY_LOCAL_RANK", "RANK"):
        assert group.execute_all_sync("getenv", name) == [str(rank) for rank in range(size)]
    for name in ("LOCAL_WORLD_SIZE", "RAY_LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        assert group.execute_all_sync("getenv", name) == [str(size)] * size
    if size > 1:
        assert group.execute_all_sync("getenv", key="MINE") == ["7"] * size


def test_a_tensordict_is_rejected_with_its_conversion(group) -> None:
    data = sample().exclude("ids")
    with pytest.raises(DispatchError, match=r"got TensorDict. Convert.*DataProto.from_tensordict"):
        group.unchanged(data)
    batch = DataProto.from_tensordict(data)
    assert group.unchanged(batch).to_tensordict()["x"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DispatchError, match=r"TensorDict on rank.*DataProto.from_tensordict"):
        group.tensordict(batch)


def test_one_to_all_sends_the_whole_tensordict_to_every_worker(group) -> None:
    assert group.total(sample()) == [10] * group.world_size


def test_lists_are_scattered_after_scatter_lists(group, monkeypatch) -> None:
    ranks = range(group.world_size)
    monkeypatch.setattr(Dispatch.ALL_TO_ALL, "mode", Dispatch.ALL_TO_ALL.mode)
    scatter_lists()
    assert group.execute_all_sync("adder_plain", [10 * rank for rank in ranks]) == [
        (rank, 10 * rank, 0) for rank in ranks
    ]
    longer = [0] * (group.world_size + 1)
    assert group.execute_all_sync("adder_plain", longer) == [(rank, longer, 0) for rank in ranks]


def test_role_names_that_shadow_attributes_are_rejected() -> None:
    with pytest.raises(PlacementError, match="role 'rank' would be shadowed"):
        create_colocated_worker_raw_cls({"rank": ClassWithInitArgs(Worker)})
    with pytest.raises(PlacementError, match="name_prefix 'adder' is also the name of a role"):
        ClassWithInitArgs(Hybrid).roles("adder")
