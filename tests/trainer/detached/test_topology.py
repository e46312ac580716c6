"""Edges between makers and trainers: the default rule, explicit ones, and what is refused."""

from __future__ import annotations

import pytest

from trainer.detached.topology import Topology, counts, maker_pool, maker_role
from verl_like.errors import ConfigError


def sent(edges: tuple[tuple[int, int], ...]) -> dict[int, set[int]]:
    """Sender -> receivers."""
    return {sender: {to for s, to in edges if s == sender} for sender, _ in edges}


@pytest.mark.parametrize(
    ("preset", "experience", "weights"),
    [
        ("1m1t", {0: {0}}, {0: {0}}),
        ("2m1t", {0: {0}, 1: {0}}, {0: {0, 1}}),
        ("1m2t", {0: {0, 1}}, {0: {0}}),
        ("2m2t", {0: {0}, 1: {1}}, {0: {0}, 1: {1}}),
        ("3m2t", {0: {0}, 1: {1}, 2: {0}}, {0: {0, 2}, 1: {1}}),
        ("2m3t", {0: {0, 2}, 1: {1}}, {0: {0}, 1: {1}}),
        ("12m1t", {maker: {0} for maker in range(12)}, {0: set(range(12))}),
    ],
)
def test_default_edges(
    preset: str, experience: dict[int, set[int]], weights: dict[int, set[int]]
) -> None:
    topology = Topology.of(*counts(preset))
    assert sent(topology.experience) == experience
    assert sent(topology.weights) == weights


def test_explicit_edges_replace_the_rule_each_for_itself() -> None:
    topology = Topology.of(
        3, 2, edges=[[2, 0], [0, 0], [1, 1]], weight_edges=[[1, 0], [1, 1], [1, 2]]
    )
    assert topology.experience == ((0, 0), (1, 1), (2, 0))
    assert topology.makers_of(0) == [0, 2]
    assert topology.trainers_of(1) == [1]
    assert [topology.weight_sender(maker) for maker in range(3)] == [1, 1, 1]
    assert topology.weight_receivers(0) == []
    assert Topology.of(3, 2, edges=[[0, 0], [1, 1], [2, 0]]).weights == ((0, 0), (0, 2), (1, 1))


def test_makers_have_roles_and_pools_of_their_own() -> None:
    assert Topology.of(2, 1).roles() == {"rollout": "maker_0_pool", "rollout_1": "maker_1_pool"}
    assert (maker_role(0), maker_role(2)) == ("rollout", "rollout_2")
    assert maker_pool(2) == "maker_2_pool"


def test_the_table_shows_every_edge_and_who_sends_nothing() -> None:
    lines = Topology.of(2, 3).describe().splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["maker", "0", "rollout", "maker_0_pool", "trainer", "0,", "2", "-"],
        ["maker", "1", "rollout_1", "maker_1_pool", "trainer", "1", "-"],
        ["trainer", "0", "rank", "0", "trainer_pool", "-", "maker", "0"],
        ["trainer", "1", "rank", "1", "trainer_pool", "-", "maker", "1"],
        ["trainer", "2", "rank", "2", "trainer_pool", "-", "-"],
    ]
    assert max(map(len, Topology.of(2, 3).describe(40).splitlines())) <= 40


@pytest.mark.parametrize("preset", ["m1t", "0m1t", "1m0t", "1m1", "1M1t", "2m-1t", "", "1.5m1t"])
def test_a_preset_that_is_none_is_refused(preset: str) -> None:
    with pytest.raises(ConfigError, match="1m1t, 2m1t, 1m2t, 2m2t"):
        counts(preset)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"makers": 0}, "detached.makers=0: a number of 1 or more"),
        ({"trainers": -1}, "detached.trainers=-1"),
        ({"edges": [[0, 0], [1, 2]]}, r"\[1,2\] names trainer 2, .* trainers 0 to 1"),
        ({"edges": [[0, 0], [2, 1]]}, r"\[2,1\] names maker 2, .* makers 0 to 1"),
        ({"edges": [[0, -1], [1, 1]]}, r"\[0,-1\] names trainer -1"),
        ({"edges": [[0, 0], [1, 1], [0, 0]]}, r"\[0,0\] is there 2 times"),
        ({"edges": [[0, 0, 1]]}, r"\[0, 0, 1\] is no edge. An edge is \[maker,trainer\]"),
        ({"edges": ["00"]}, "00 is no edge"),
        ({"edges": [7]}, "7 is no edge"),
        ({"edges": [[0, True]]}, "is no edge"),
        ({"edges": [[0, 0], [0, 1]]}, r"maker 1 sends its samples to nobody. Add \[1,1\]"),
        ({"edges": [[0, 0], [1, 0]]}, r"trainer 1 gets samples from nobody.* Add \[1,1\]"),
        ({"edges": []}, "maker 0 sends its samples to nobody"),
        ({"weight_edges": [[0, 0]]}, r"maker 1 gets weights from nobody.* such as \[1,1\]"),
        ({"weight_edges": [[0, 0], [0, 1], [1, 1]]}, "maker 1 gets weights from trainers 0, 1"),
        ({"weight_edges": [[2, 0]]}, r"detached.weight_edges: \[2,0\] names trainer 2"),
    ],
)
def test_edges_that_cannot_work_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology.of(**{"makers": 2, "trainers": 2, **settings})
