"""Pools of processes, and the manager of a run's pools."""

from __future__ import annotations

import pytest

import verl_like
from verl_like import ClassWithInitArgs, LocalWorkerGroup, RayResourcePool, ResourcePool, Role
from verl_like.errors import PlacementError
from verl_like.placement.pools import PoolManager, cpu_share


@pytest.mark.parametrize("counts", [[], [0], [2, -1], ["2"], [1.5], [True]])
def test_counts_below_one_are_rejected(counts: list[object]) -> None:
    with pytest.raises(PlacementError, match="each 1 or more"):
        ResourcePool(counts)


def test_shares_of_cpus_always_fit() -> None:
    for cpus in (1.0, 2.0, 3.7, 16.0):
        for processes in range(1, 40):
            assert cpu_share(cpus, processes) * processes <= cpus


def test_an_uneven_pool_counts_its_ranks() -> None:
    pool = ResourcePool([1, 2])
    pool.add_node(3)
    assert pool.world_size == 6
    assert pool.local_rank_list() == [0, 0, 1, 0, 1, 2]
    assert pool.local_world_size_list() == [1, 2, 2, 3, 3, 3]
    assert pool.node_list() == [0, 1, 1, 2, 2, 2]


def test_a_local_group_accepts_a_ray_pool() -> None:
    from tests.verl_like.sample_workers import Adder

    group = LocalWorkerGroup(RayResourcePool([1]), ClassWithInitArgs(Adder))
    assert group.world_size == 1
    group.shutdown()


@pytest.fixture
def manager() -> PoolManager:
    return PoolManager(
        resource_pool_spec={"main": [2], "other": [1, 1]},
        mapping={Role.ActorRollout: "main", Role.Critic: "other", "my_own_role": "other"},
    )


@pytest.mark.parametrize("creates_first", [False, True])
def test_the_manager_creates_each_pool_once_and_resolves_aliases(
    manager: PoolManager, creates_first: bool
) -> None:
    if creates_first:
        manager.create_resource_pool()
    assert manager.get_resource_pool("my_own_role").world_size == 2
    assert manager.get_resource_pool(Role.ActorRollout) is manager.get_resource_pool("rollout")
    assert manager.get_n_gpus() == 4


def test_the_manager_rejects_unmapped_roles_and_unknown_pools(manager: PoolManager) -> None:
    with pytest.raises(PlacementError, match="role 'critics' is on no pool. Did you mean 'critic'"):
        manager.get_resource_pool("critics")
    with pytest.raises(PlacementError, match="'critic' is mapped to pool 'two'"):
        PoolManager({"one": [1]}, {"critic": "two"})


def test_the_public_manager_creates_ray_pools() -> None:
    spec, mapping = {"main": [2]}, {"critic": "main"}
    manager = verl_like.ResourcePoolManager(resource_pool_spec=spec, mapping=mapping)
    assert type(manager.get_resource_pool("critic")) is RayResourcePool


def test_a_pool_is_released_after_its_block_and_has_a_repr() -> None:
    released = []

    class Reserving(ResourcePool):
        def release(self) -> None:
            released.append(self)

    with Reserving([1, 2]) as pool:
        assert repr(pool) == "Reserving([1, 2])"
        assert released == []
    assert released == [pool]


def test_a_pool_takes_a_list() -> None:
    with pytest.raises(PlacementError, match=r"a list of process counts .*, not 2\.$"):
        ResourcePool(2)
