"""The plan: capacity checks before anything starts, and its printed form."""

from __future__ import annotations

from typing import Any

import pytest

from verl_like import Placement
from verl_like.errors import InsufficientResourcesError, PlacementError
from verl_like.placement.pools import NodeSpec, ProcessNeeds

NODES = [NodeSpec("a", devices=4, cpus=4.0), NodeSpec("b", devices=2, cpus=2.0)]


@pytest.fixture
def plan() -> Placement:
    return Placement.plan(
        {"main": [2, 1], "critic_pool": [1]},
        {"actor_rollout": "main", "critic": "critic_pool"},
        NODES,
    )


def test_a_plan_prints_as_a_table(plan: Placement) -> None:
    lines = str(plan).splitlines()
    assert lines[0].split() == ["pool", "node", "devices", "roles", "processes", "CPUs"]
    assert [line.split("  ")[0] for line in lines[1:]] == ["main", "main", "critic_pool"]
    assert "actor, rollout" in lines[1]


def test_equal_nodes_share_a_row_except_in_a_file() -> None:
    nodes = [NodeSpec(f"n{number}", devices=8, cpus=64.0) for number in range(100)]
    pools = {"main": [8] * 60 + [4] * 20, "rest": [8, 8]}
    plan = Placement.plan(pools, {"actor": "main", "critic": "rest"}, nodes)
    assert len(plan.draw().splitlines()) == 5
    drawn = " ".join(plan.draw().split())
    assert "main n0 to n59 60 x 8 CPU slots actor 60 x 8 60 x " in drawn
    assert "main n60 to n79 20 x 4 CPU slots actor 20 x 4 20 x " in drawn
    assert len(str(plan).splitlines()) == 83


def test_every_role_has_a_pool_and_every_entry_of_a_pool_its_own_node(plan: Placement) -> None:
    assert plan.role_mapping == {"actor": "main", "rollout": "main", "critic": "critic_pool"}
    assert [node.name for node in plan.pools["main"].nodes] == ["a", "b"]
    assert [node.name for node in plan.pools["critic_pool"].nodes] == ["a"]


def test_a_pool_larger_than_any_node_is_rejected_with_the_free_slots() -> None:
    with pytest.raises(
        PlacementError,
        match=r"pool 'main' needs 1 node\(s\), and no node .* 5 .* a: 4 of 4 CPU slots",
    ):
        Placement.plan({"main": [5]}, {"actor": "main"}, NODES)


def test_an_error_marks_the_node_that_the_pool_uses_already() -> None:
    with pytest.raises(
        PlacementError, match=r"a: 1 of 4 .* \(holds another part of this pool\); b: 2 of 2 CPU sl"
    ):
        Placement.plan({"main": [3, 3]}, {"actor": "main"}, NODES)


def test_a_pool_without_enough_cpus_is_rejected() -> None:
    with pytest.raises(PlacementError, match="set cpus_per_process below 3"):
        Placement.plan({"main": [2]}, {"actor": "main"}, NODES, cpus_per_process=3.0)


def test_processes_share_scarce_cpus() -> None:
    placement = Placement.plan({"main": [4]}, {"actor": "main"}, [NodeSpec("a", 4, 1.0)])
    assert placement.pools["main"].cpus_per_process == 0.25


def test_zero_cpus_per_process_are_rejected() -> None:
    with pytest.raises(PlacementError, match="cpus_per_process must be above 0"):
        Placement.plan({"main": [1]}, {"actor": "main"}, NODES, cpus_per_process=0.0)


TWO_POOLS = {"generator_pool": [2], "trainer_pool": [2]}
ROLES = {"rollout": "generator_pool", "actor": "trainer_pool"}
ON_CPUS = ProcessNeeds("cpu", cpus=0.5)


def test_a_pool_on_cpus_leaves_the_gpus_of_its_node_to_others() -> None:
    node = NodeSpec("a", devices=2, cpus=4.0, kind="GPU")
    with pytest.raises(PlacementError, match="pool 'trainer_pool' .* 0 of 2 GPUs"):
        Placement.plan(TWO_POOLS, ROLES, [node])
    plan = Placement.plan(TWO_POOLS, ROLES, [node], needs={"generator_pool": ON_CPUS})
    assert [p.device_kind for p in plan.pools.values()] == ["cpu", "cuda"]
    assert [p.gpus_per_process for p in plan.pools.values()] == [0.0, 1.0]
    assert "2 CPU slots" in str(plan).splitlines()[1]
    assert "2 GPUs" in str(plan).splitlines()[2]


def test_processes_can_share_a_gpu() -> None:
    node = NodeSpec("a", devices=1, cpus=4.0, kind="GPU")
    half = dict.fromkeys(TWO_POOLS, ProcessNeeds(gpus=0.25))
    plan = Placement.plan(TWO_POOLS, ROLES, [node], needs=half)
    assert "0.5 GPUs" in str(plan).splitlines()[1]
    with pytest.raises(PlacementError, match="0.5 of 1 GPUs"):
        Placement.plan(
            TWO_POOLS, ROLES, [node], needs=half | {"trainer_pool": ProcessNeeds(gpus=0.5)}
        )


def test_a_pool_on_gpus_is_placed_on_gpu_nodes_or_rejected() -> None:
    wants = {"trainer_pool": ProcessNeeds("cuda")}
    with_gpus = NodeSpec("c", devices=2, cpus=2.0, kind="GPU")
    plan = Placement.plan(TWO_POOLS, ROLES, [*NODES, with_gpus], needs=wants)
    assert [node.name for node in plan.pools["trainer_pool"].nodes] == ["c"]
    with pytest.raises(PlacementError, match="set trainer.device=cpu or .*trainer_pool.device=cpu"):
        Placement.plan(TWO_POOLS, ROLES, NODES, needs=wants)


def test_a_pools_own_cpus_are_reserved_before_the_others_share() -> None:
    needs = {"generator_pool": ProcessNeeds(cpus=0.25)}
    plan = Placement.plan(TWO_POOLS, ROLES, [NodeSpec("a", 4, 2.0)], needs=needs)
    assert [p.cpus_per_process for p in plan.pools.values()] == [0.25, 0.75]
    with pytest.raises(
        PlacementError,
        match="takes 2 of 2 CPUs and leaves too few for the other",
    ):
        Placement.plan(
            TWO_POOLS,
            ROLES,
            [NodeSpec("a", 4, 2.0)],
            needs={"generator_pool": ProcessNeeds(cpus=1.0)},
        )


def test_custom_resources_are_counted_on_nodes_that_declare_them() -> None:
    needs = {"generator_pool": ProcessNeeds(resources={"accel": 1.0})}
    plan = Placement.plan(TWO_POOLS, ROLES, NODES, needs=needs)
    assert "2 CPU slots, 2 accel" in str(plan).splitlines()[1]

    known = [NodeSpec("a", 4, 4.0, resources={"accel": 1.0}), NodeSpec("b", 2, 2.0, resources={})]
    with pytest.raises(
        PlacementError,
        match="1 accel each: .* 1 of 1 accel.*lower pool_resources.generator_pool.res",
    ):
        Placement.plan(TWO_POOLS, ROLES, known, needs=needs)
    one = {"generator_pool": [1], "trainer_pool": [1]}
    plan = Placement.plan(one, ROLES, known[::-1], needs=needs)
    assert [node.name for node in plan.pools["generator_pool"].nodes] == ["a"]


def cluster(*nodes: NodeSpec) -> Placement:
    """Return trainers on the first node with room for two, and generators where one fits."""
    spec, mapping = (
        {"trainers": [2], "generators": [1, 1]},
        {"actor": "trainers", "rollout": "generators"},
    )
    return Placement.plan(spec, mapping, nodes, cpus_per_process=1.0)


def node(name: str, devices: int) -> NodeSpec:
    return NodeSpec(name, devices, float(devices), key=name)


def test_only_the_lost_part_of_a_pool_moves_to_a_spare_node() -> None:
    large, small, other, spare = (node(n, d) for n, d in (("a", 2), ("b", 1), ("c", 1), ("d", 1)))
    before = cluster(large, small, other, spare)
    assert before.pools["generators"].nodes == (small, other)
    after = before.moved("generators", [large, other, spare])
    assert after.pools["generators"].nodes == (other, spare)
    assert after.pools["trainers"] == before.pools["trainers"]
    assert before.moved("generators", [large, small, other]) == before


def test_a_pool_moves_only_to_a_free_node_it_does_not_use() -> None:
    before = cluster(node("a", 2), node("b", 1), node("c", 1))
    wide = node("c", 3)  # it holds the other part, and has room for two more
    with pytest.raises(InsufficientResourcesError) as error:
        before.moved("generators", [node("a", 2), wide])
    message = str(error.value)
    assert "lost node(s) b (b): pool 'generators' needs 2 node(s)" in message
    assert "a: 0 of 2 CPU slots" in message
    assert "c: 2 of 3 CPU slots and 2 of 3 CPUs free (holds another part of this pool)" in message


def test_a_pool_on_gpus_moves_to_gpus() -> None:
    first, slots, second = (
        NodeSpec("a", 1, 4.0, "GPU", "a"),
        NodeSpec("b", 4, 4.0, "CPU slot", "b"),
        NodeSpec("c", 1, 4.0, "GPU", "c"),
    )
    before = Placement.plan({"p": [1]}, {"actor": "p"}, [first], 1.0)
    assert before.moved("p", [slots, second]).pools["p"].nodes == (second,)


def labelled(name: str, **labels: str) -> NodeSpec:
    return NodeSpec(name, 2, 2.0, key=name, labels=labels)


def test_a_pool_is_placed_only_on_nodes_with_its_labels() -> None:
    nodes = [labelled("a", zone="one"), labelled("b", zone="two")]
    needs = {"p": ProcessNeeds(labels={"zone": "two"})}
    plan = Placement.plan({"p": [2]}, {"actor": "p"}, nodes, needs=needs)
    assert plan.pools["p"].nodes == (nodes[1],)
    assert plan.moved("p", nodes).pools["p"].nodes == (nodes[1],)
    with pytest.raises(InsufficientResourcesError, match="with --labels=zone=two, or change pool_"):
        Placement.plan({"p": [2]}, {"actor": "p"}, nodes[:1], needs=needs)


@pytest.mark.parametrize("need", [{"labels": {"zone": "two"}}, {"resources": {"disk": 1.0}}])
def test_other_pools_leave_the_nodes_to_a_pool_that_needs_them(need: dict[str, Any]) -> None:
    special = NodeSpec("b", 2, 2.0, key="b", labels={"zone": "two"}, resources={"disk": 2.0})
    nodes = [special, NodeSpec("a", 2, 2.0, key="a", labels={}, resources={})]
    pools, roles = {"first": [2], "second": [2]}, {"actor": "first", "critic": "second"}
    plan = Placement.plan(pools, roles, nodes, needs={"second": ProcessNeeds(**need)})
    assert [*plan.pools] == ["first", "second"]
    assert plan.pools["second"].nodes == (special,)


def test_a_pool_of_several_nodes_stays_in_one_rack_if_it_fits_there() -> None:
    racks = {"a": "one", "b": "two", "c": "three", "d": "two"}
    nodes = [labelled(name, rack=rack) for name, rack in racks.items()]
    near = Placement.plan({"p": [2, 1]}, {"actor": "p"}, nodes).pools["p"]
    assert [node.name for node in near.nodes] == ["b", "d"]
    wide = Placement.plan({"p": [2, 1, 2]}, {"actor": "p"}, nodes).pools["p"]
    assert [node.name for node in wide.nodes] == ["a", "b", "c"]
