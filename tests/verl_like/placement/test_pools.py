"""Pools, role tables and the plan, checked before anything starts."""

from __future__ import annotations

import pytest

from verl_like import LocalWorkerGroup, Placement, ResourcePool, ResourcePoolManager, Role
from verl_like.errors import PlacementError
from verl_like.placement.pools import Node, cpu_share, expand_roles

NODES = [Node("a", devices=4, cpus=4.0), Node("b", devices=2, cpus=2.0)]


def test_a_plan_prints_as_a_table() -> None:
    plan = Placement.plan(
        {"main": [2, 1], "critic_pool": [1]},
        {"actor_rollout": "main", "critic": "critic_pool"},
        NODES,
    )
    lines = str(plan).splitlines()
    assert lines[0].split() == ["pool", "node", "devices", "roles", "processes", "CPUs"]
    assert [line.split("  ")[0] for line in lines[1:]] == ["main", "main", "critic_pool"]
    assert "actor, rollout" in lines[1]
    narrow = plan.draw(40).splitlines()
    assert narrow[0] == "main"
    assert max(map(len, narrow)) <= 40
    assert (
        " ".join(narrow[1:3]).split()
        == "node a; devices 2 CPU slots; roles actor, rollout; processes 2; CPUs 2".split()
    )
    assert plan.role_mapping == {"actor": "main", "rollout": "main", "critic": "critic_pool"}


@pytest.mark.parametrize("counts", [[], [0], [2, -1], ["2"], [1.5], [True]])
def test_counts_below_one_are_refused(counts: list[object]) -> None:
    with pytest.raises(PlacementError, match="each 1 or more"):
        ResourcePool(counts)


def test_a_pool_larger_than_its_node_is_refused_per_node() -> None:
    with pytest.raises(
        PlacementError, match=r"pool 'main' needs 1 node\(s\), one with 5 .* a: 4 of 4 CPU slots"
    ):
        Placement.plan({"main": [5]}, {"actor": "main"}, NODES)
    with pytest.raises(PlacementError, match="b: 2 of 2 CPU slots"):
        Placement.plan({"main": [3, 3]}, {"actor": "main"}, NODES)


def test_cpus_count_too() -> None:
    with pytest.raises(PlacementError, match="set cpus_per_process below 3"):
        Placement.plan({"main": [2]}, {"actor": "main"}, NODES, cpus_per_process=3.0)
    assert (
        Placement.plan({"main": [4]}, {"actor": "main"}, [Node("a", 4, 1.0)])
        .pools["main"]
        .cpus_per_process
        == 0.25
    )
    with pytest.raises(PlacementError, match="cpus_per_process must be above 0"):
        Placement.plan({"main": [1]}, {"actor": "main"}, NODES, cpus_per_process=0.0)


def test_shares_of_cpus_always_fit() -> None:
    for cpus in (1.0, 2.0, 3.7, 16.0):
        for processes in range(1, 40):
            assert cpu_share(cpus, processes) * processes <= cpus


def test_unknown_pools_and_pools_without_role_are_refused() -> None:
    with pytest.raises(
        PlacementError,
        match=r"'critic' is mapped to pool 'critic_pol'.* Did you mean 'critic_pool'",
    ):
        Placement.plan({"critic_pool": [1]}, {"critic": "critic_pol"}, NODES)
    with pytest.raises(PlacementError, match="pool 'spare' has no role"):
        Placement.plan({"main": [1], "spare": [1]}, {"critic": "main"}, NODES)


def test_an_alias_is_two_roles_and_may_not_be_named_beside_them() -> None:
    assert expand_roles({Role.ActorRolloutRef: "p"}) == {"actor": "p", "rollout": "p", "ref": "p"}
    with pytest.raises(PlacementError, match="role 'actor' is mapped twice"):
        expand_roles({"actor": "p", "actor_rollout": "q"})


def test_the_manager_makes_each_pool_once_and_knows_aliases() -> None:
    manager = ResourcePoolManager(
        resource_pool_spec={"main": [2], "other": [1, 1]},
        mapping={Role.ActorRollout: "main", Role.Critic: "other", "my_own_role": "other"},
        pool_cls=ResourcePool,
    )
    manager.create_resource_pool()
    assert manager.get_resource_pool(Role.ActorRollout) is manager.get_resource_pool("rollout")
    assert manager.get_resource_pool("my_own_role").world_size == 2
    assert manager.get_n_gpus() == 4
    with pytest.raises(PlacementError, match="role 'critics' is on no pool. Did you mean 'critic'"):
        manager.get_resource_pool("critics")


def test_an_uneven_pool_counts_its_ranks() -> None:
    pool = ResourcePool([1, 2])
    pool.add_node(3)
    assert pool.world_size == 6
    assert pool.local_rank_list() == [0, 0, 1, 0, 1, 2]
    assert pool.local_world_size_list() == [1, 2, 2, 3, 3, 3]
    assert pool.node_list() == [0, 1, 1, 2, 2, 2]


def test_a_local_group_knows_nothing_of_ray_pools() -> None:
    from tests.verl_like.sample_workers import Adder
    from verl_like import ClassWithInitArgs, RayResourcePool

    group = LocalWorkerGroup(RayResourcePool([1]), ClassWithInitArgs(Adder))
    assert group.world_size == 1
    group.shutdown()
