"""Routes between generators and trainers: the default rule, explicit routes, and errors."""

from __future__ import annotations

import pytest

from trainer.async_training.topology import Topology, counts
from verl_like.errors import ConfigError


def sent(edges: tuple[tuple[int, int], ...]) -> dict[int, set[int]]:
    """Return sender -> receivers."""
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
        ("12m1t", {generator: {0} for generator in range(12)}, {0: set(range(12))}),
    ],
)
def test_default_routes(
    preset: str, experience: dict[int, set[int]], weights: dict[int, set[int]]
) -> None:
    topology = Topology.of(*counts(preset))
    assert sent(topology.experience) == experience
    assert sent(topology.weights) == weights


def test_explicit_routes_of_samples_or_weights_replace_their_defaults() -> None:
    topology = Topology.of(
        3, 2, sample_routes=[[2, 0], [0, 0], [1, 1]], weight_routes=[[1, 0], [1, 1], [1, 2]]
    )
    assert topology.experience == ((0, 0), (1, 1), (2, 0))
    assert topology.generators_of[0] == [0, 2]
    assert topology.trainers_of[1] == [1]
    assert [topology.weight_sender(generator) for generator in range(3)] == [1, 1, 1]
    assert topology.weight_receivers(0) == []
    assert Topology.of(3, 2, sample_routes=[[0, 0], [1, 1], [2, 0]]).weights == (
        (0, 0),
        (0, 2),
        (1, 1),
    )


def test_the_table_shows_every_route() -> None:
    lines = Topology.of(2, 3).describe().splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["generator", "0", "rollout", "generator_0_pool", "trainer", "0,", "2", "-"],
        ["generator", "1", "rollout_1", "generator_1_pool", "trainer", "1", "-"],
        ["trainer", "0", "rank", "0", "trainer_pool", "-", "generator", "0"],
        ["trainer", "1", "rank", "1", "trainer_pool", "-", "generator", "1"],
        ["trainer", "2", "rank", "2", "trainer_pool", "-", "-"],
    ]


@pytest.mark.parametrize("preset", ["m1t", "0m1t", "1m1", "2m-1t", ""])
def test_an_unknown_preset_is_rejected(preset: str) -> None:
    with pytest.raises(ConfigError, match="<generators>m<trainers>t"):
        counts(preset)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"generators": 0}, "async_training.generators=0: use a whole number of 1"),
        (
            {"sample_routes": [[0, 0], [1, 2]]},
            r"\[1,2\] names trainer 2, .* from 0, and .*trainers=2",
        ),
        ({"sample_routes": [[0, 0], [1, 1], [0, 0]]}, r"\[0,0\] is listed 2 times"),
        (
            {"sample_routes": [[0, 0, 1]]},
            r"\[0, 0, 1\] is not a route. Use two numbers, \[generator,trainer\]",
        ),
        (
            {"sample_routes": [[0, 0], [0, 1]]},
            r"generator 1 sends its samples to no trainer. Add \[1,1\]",
        ),
        ({"sample_routes": [[0, 0], [1, 0]]}, r"trainer 1 gets no samples.* Add \[1,1\]"),
        (
            {"weight_routes": [[0, 0]]},
            r"generator 1 gets weights from no trainer.* such as \[1,1\]",
        ),
        (
            {"weight_routes": [[0, 0], [0, 1], [1, 1]]},
            "generator 1 gets weights from trainers 0, 1",
        ),
    ],
)
def test_routes_that_cannot_work_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Topology.of(**{"generators": 2, "trainers": 2, **settings})
