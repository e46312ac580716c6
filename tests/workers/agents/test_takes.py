"""Trajectories over several calls of `take`, as in asynchronous training."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from tests.workers.agents.test_loop import (
    HERE,
    WIDTH,
    drawn_of,
    fresh_engine,
    same_bits,
    starts,
)
from tests.workers.rollout_engines import load
from verl_like.errors import RolloutError
from workers.agents.chat import TurnRenderer
from workers.agents.environment import EnvironmentSpec
from workers.agents.faults import Faults
from workers.agents.host import EnvironmentHost
from workers.agents.loop import TurnLoop
from workers.agents.trajectory import Trajectory
from workers.config import EnvironmentConfig
from workers.rollout.base import SamplingParams
from workers.rollout.native.engine import NativeEngine

Looped = Callable[..., tuple[TurnLoop, NativeEngine]]
OPEN = 64


@pytest.fixture
def looped(tokenizer: Any, model: Any, host_of: Callable[..., EnvironmentHost]) -> Looped:
    """Return loops that play an environment of `games`."""

    def made(name: str, kwargs: Any = None, **settings: Any) -> tuple[TurnLoop, NativeEngine]:
        config = EnvironmentConfig(
            **{"max_tokens_per_turn": 6, "step_timeout_s": 5.0, "retries": 0, **settings}
        )
        spec = EnvironmentSpec(f"{HERE}:{name}", kwargs or {})
        host = host_of(spec, config.step_timeout_s)
        chat, engine = TurnRenderer(tokenizer, [], (tokenizer.eos_token_id,)), fresh_engine(model)
        return TurnLoop(engine, host, chat, config), engine

    return made


def sampling(tokenizer: Any, **more: Any) -> SamplingParams:
    stops = {"max_tokens": WIDTH, "stop_token_ids": (tokenizer.eos_token_id,)}
    return SamplingParams(**{**stops, **more})


def taken(loop: TurnLoop, **bounds: Any) -> tuple[dict[int, Trajectory], int]:
    """Return all results, taken bit by bit, and the number of takes."""
    found: dict[int, Trajectory] = {}
    count = 0
    while loop.num_running:
        found |= loop.take(**bounds)
        count += 1
    return found, count


@pytest.mark.parametrize("bounds", [{"max_tokens": 2}, {"seconds": 0.001}])
def test_takes_of_a_few_tokens_or_moments_are_one_take(
    looped: Looped, tokenizer: Any, bounds: dict[str, Any]
) -> None:
    whole, _ = looped("Count")
    expected = whole.play(starts(0, 6), sampling(tokenizer), OPEN)
    loop, _ = looped("Count")
    first = loop.submit(starts(0, 3), sampling(tokenizer), OPEN)
    early = loop.take(**bounds)
    second = loop.submit(starts(3, 6), sampling(tokenizer), OPEN)
    found, count = taken(loop, **bounds)
    found |= early
    same_bits([found[number] for number in [*first, *second]], expected)
    assert count > 5


def test_an_environment_that_never_answers_holds_up_no_take(looped: Looped, tokenizer: Any) -> None:
    loop, _ = looped("Count", kwargs={"turns": 2, "sleep": 60.0, "slow_row": 0}, retries=2)
    numbers = loop.submit(starts(0, 4), sampling(tokenizer), OPEN)
    found: dict[int, Trajectory] = {}
    while len(found) < 3:
        began = time.monotonic()
        found |= loop.take(max_tokens=4, seconds=0.1)
        assert time.monotonic() - began < 2.0
    assert set(found) == set(numbers[1:])
    assert {one.ended for one in found.values()} == {"terminated"}
    late = loop.take()
    assert [(one.ended, one.attempts) for one in late.values()] == [("deadline", 1)]


def test_later_turns_and_tokens_have_the_version_that_drew_them(
    looped: Looped, tokenizer: Any, model: Any
) -> None:
    loop, engine = looped("Count")
    loop.submit(starts(0, 4), sampling(tokenizer), OPEN)
    assert not loop.take(max_tokens=3)
    load(engine, model, 4)
    found = []
    for one in loop.take().values():
        versions = one.sample.versions[drawn_of(one)].tolist()
        assert versions == sorted(versions)
        assert (one.sample.versions[~drawn_of(one)] == -1).all()
        found.append(set(versions))
    assert {3, 4} in found
    assert {3} not in found


def test_what_is_aborted_leaves_no_environment_and_the_next_begins_anew(
    looped: Looped, tokenizer: Any
) -> None:
    loop, engine = looped("Count")
    loop.submit(starts(0, 4), sampling(tokenizer), OPEN)
    loop.take(max_tokens=3)
    loop.abort()
    assert (loop.num_running, engine.num_running) == (0, 0)
    expected = looped("Count")[0].play(starts(0, 4), sampling(tokenizer), OPEN)
    same_bits(loop.play(starts(0, 4), sampling(tokenizer), OPEN), expected)


def test_trajectories_that_run_together_are_sampled_in_one_way(
    looped: Looped, tokenizer: Any
) -> None:
    loop, _ = looped("Count")
    loop.submit(starts(0, 2), sampling(tokenizer), OPEN)
    with pytest.raises(RolloutError, match="2 trajectories are running with other sampling"):
        loop.submit(starts(2, 4), sampling(tokenizer, temperature=0.5), OPEN)


def test_an_environment_that_is_killed_on_purpose_is_played_again_with_the_same_noise(
    looped: Looped, tokenizer: Any
) -> None:
    expected = looped("Count", step_timeout_s=30.0)[0].play(starts(0, 8), sampling(tokenizer), OPEN)
    faults = Faults(kill_environment=0.3, delay_environment=0.3, delay_s=0.05, seed=1)
    struck = [replace(start, faults=faults) for start in starts(0, 8)]
    found = looped("Count", step_timeout_s=30.0, retries=1)[0].play(
        struck, sampling(tokenizer), OPEN
    )
    same_bits(found, expected)
    for one in found:
        assert one.attempts == 1 + one.faults["kill_environment"]
    assert 0 < sum(one.attempts - 1 for one in found) < 8
    slow = [one for one in found if one.faults["delay_environment"]]
    assert slow
    assert all(one.environment_s > 0.05 for one in slow if one.attempts == 1)

    given_up = looped("Count", step_timeout_s=30.0)[0].play(struck, sampling(tokenizer), OPEN)
    assert [bool(one.problem) for one in given_up] == [one.attempts > 1 for one in found]


def test_a_trajectory_that_gets_no_process_is_begun_anew_and_ends_no_other(
    tokenizer: Any, model: Any
) -> None:
    config = EnvironmentConfig(max_tokens_per_turn=6, step_timeout_s=20.0, retries=1)
    chat = TurnRenderer(tokenizer, [], (tokenizer.eos_token_id,))
    with closing(
        EnvironmentHost(EnvironmentSpec("tests.workers.agents.forks:Count"), 20.0)
    ) as host:
        loop = TurnLoop(fresh_engine(model), host, chat, config)
        found = loop.play(starts(0, 4), sampling(tokenizer), OPEN)
    assert [one.problem for one in found] == [""] * 4
    assert sorted(one.attempts for one in found) == [1, 1, 1, 2]
