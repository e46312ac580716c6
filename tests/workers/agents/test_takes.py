"""Trajectories over several calls of `collect`, as in asynchronous training."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.workers.agents.test_loop import (
    HERE,
    assert_same_bits,
    new_loop,
    sampled_mask,
    sampling_of,
    starts,
)
from tests.workers.rollout_engines import load
from verl_like.errors import RolloutError
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.players import TurnLoop
from workers.agents.trajectory import Trajectory
from workers.rollout.base import SamplingParams

MakeLoop = Callable[..., TurnLoop]
OPEN = 64


@pytest.fixture
def make_loop(tokenizer: Any, model: Any, host_of: Callable[..., EnvironmentHost]) -> MakeLoop:
    """Return a function that makes loops for the environment `Count` with these arguments."""

    def make(step_timeout_s: float = 5.0, retries: int = 0, **kwargs: Any) -> TurnLoop:
        host = host_of(EnvironmentSpec(f"{HERE}:Count", kwargs), step_timeout_s)
        return new_loop(model, tokenizer, host, retries=retries)

    return make


@pytest.fixture
def sampling(tokenizer: Any) -> SamplingParams:
    return sampling_of(tokenizer)


def take_all(loop: TurnLoop, **bounds: Any) -> tuple[dict[int, Trajectory], int]:
    """Return all trajectories, and the number of takes."""
    trajectories: dict[int, Trajectory] = {}
    count = 0
    while loop.num_running:
        trajectories |= loop.collect(**bounds)
        count += 1
    return trajectories, count


@pytest.mark.parametrize("bounds", [{"max_tokens": 2}, {"seconds": 0.001}])
def test_many_short_takes_have_the_bits_of_one(
    make_loop: MakeLoop, sampling: SamplingParams, bounds: dict[str, Any]
) -> None:
    expected = make_loop().play(starts(0, 6), sampling, OPEN)
    loop = make_loop()
    first = loop.submit(starts(0, 3), sampling, OPEN)
    early = loop.collect(**bounds)
    second = loop.submit(starts(3, 6), sampling, OPEN)
    trajectories, count = take_all(loop, **bounds)
    trajectories |= early
    assert_same_bits([trajectories[number] for number in [*first, *second]], expected)
    assert count > 5


@pytest.mark.long
def test_a_hanging_environment_delays_no_take(
    make_loop: MakeLoop, sampling: SamplingParams
) -> None:
    loop = make_loop(turns=2, sleep=60.0, slow_row=0, retries=2)
    numbers = loop.submit(starts(0, 4), sampling, OPEN)
    ended: dict[int, Trajectory] = {}
    while len(ended) < 3:
        began = time.monotonic()
        ended |= loop.collect(max_tokens=4, seconds=0.1)
        assert time.monotonic() - began < 2.0
    assert set(ended) == set(numbers[1:])
    assert {trajectory.ended for trajectory in ended.values()} == {"terminated"}
    (late,) = loop.collect().values()
    assert (late.ended, late.attempts) == ("deadline", 1)


def test_tokens_have_the_version_of_the_weights_that_sampled_them(
    make_loop: MakeLoop, sampling: SamplingParams, model: Any
) -> None:
    loop = make_loop()
    loop.submit(starts(0, 4), sampling, OPEN)
    assert not loop.collect(max_tokens=3)
    load(loop._engine, model, 4)
    versions = []
    for trajectory in loop.collect().values():
        is_sampled = sampled_mask(trajectory)
        sampled_versions = trajectory.sample.versions[is_sampled].tolist()
        assert sampled_versions == sorted(sampled_versions)
        assert (trajectory.sample.versions[~is_sampled] == -1).all()
        versions.append(set(sampled_versions))
    assert {3, 4} in versions
    assert {3} not in versions


def test_a_loop_plays_again_after_an_abort(make_loop: MakeLoop, sampling: SamplingParams) -> None:
    loop = make_loop()
    loop.submit(starts(0, 4), sampling, OPEN)
    loop.collect(max_tokens=3)
    loop.abort()
    assert (loop.num_running, loop._engine.num_running) == (0, 0)
    expected = make_loop().play(starts(0, 4), sampling, OPEN)
    assert_same_bits(loop.play(starts(0, 4), sampling, OPEN), expected)


def test_concurrent_trajectories_share_the_sampling_settings(
    make_loop: MakeLoop, sampling: SamplingParams
) -> None:
    loop = make_loop()
    loop.submit(starts(0, 2), sampling, OPEN)
    with pytest.raises(RolloutError, match="2 trajectories are running with other sampling"):
        loop.submit(starts(2, 4), replace(sampling, temperature=0.5), OPEN)


def test_a_killed_environment_is_retried_with_the_same_noise(
    make_loop: MakeLoop,
    sampling: SamplingParams,
    tokenizer: Any,
    model: Any,
    host_of: Callable[..., EnvironmentHost],
    tmp_path: Path,
) -> None:
    expected = make_loop(step_timeout_s=30.0).play(starts(0, 8), sampling, OPEN)
    host = host_of(EnvironmentSpec(f"{HERE}:Faulty", {"folder": str(tmp_path)}), 30.0)
    retried = new_loop(model, tokenizer, host, retries=1).play(starts(0, 8), sampling, OPEN)
    assert_same_bits(retried, expected)
    num_killed = (tmp_path / "killed").stat().st_size
    assert 0 < num_killed == sum(trajectory.attempts - 1 for trajectory in retried) < 8
