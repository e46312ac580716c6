"""Trajectories whose process was lost go on from their last finished turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from tests.workers.agents.test_loop import HERE, drawn_of, fresh_engine, same_bits
from tests.workers.agents.test_segments import SHORTENS
from tests.workers.agents.test_takes import OPEN, sampling, starts
from tests.workers.rollout_engines import load
from trainer.cli.make_tiny import make_tokenizer
from workers.agents.chat import TurnRenderer
from workers.agents.environment import EnvironmentSpec
from workers.agents.faults import Faults
from workers.agents.host import EnvironmentHost
from workers.agents.loop import GIVEN_UP, NOT_AGAIN, Start, Trajectory, TurnLoop
from workers.config import EnvironmentConfig
from workers.rollout.base import EngineLimits
from workers.rollout.begun import Begun

WIDTH, NUM = 160, 4
LIMITS = EngineLimits(prompt_width=16, response_width=WIDTH, kv_cache_gb=0.5)
COUNT, AGENTS = f"{HERE}:Count", "tests.workers.agents.agents:any_of_these"


@contextmanager
def loop_of(path: str, model: Any, template: str = "", **more: Any) -> Iterator[TurnLoop]:
    """A loop with an engine and a host of its own, as another process has them."""
    tokenizer, kwargs, version = make_tokenizer(), more.pop("kwargs", {}), more.pop("version", 3)
    tokenizer.chat_template = template or tokenizer.chat_template
    config = EnvironmentConfig(**{"max_tokens_per_turn": 6, "retries": 1, **more})
    host = EnvironmentHost(EnvironmentSpec(path, kwargs), config.step_s)
    chat, engine = TurnRenderer(tokenizer, [], (2,)), fresh_engine(model, LIMITS)
    load(engine, model, version)
    try:
        yield TurnLoop(engine, host, chat, config, tokenizer.decode)
    finally:
        host.close()


def begins(agent: str = "", faults: Faults | None = None) -> list[Any]:
    own = {"agent": agent, "arguments": {}}
    found = [replace(start, row={**start.row, **own}) for start in starts(0, NUM)]
    return [replace(start, faults=faults) for start in found] if faults else found


def lost(loop: TurnLoop, begin: list[Any], num: int = NUM // 2) -> list[Any]:
    """What is begun once more: the process is lost when so many have had two turns.

    Of those that are ahead of others it is what was known then: they may end meanwhile.
    """
    numbers = loop.submit(begin, sampling(make_tokenizer(), max_tokens=WIDTH), OPEN)
    known: dict[int, Begun] = {}
    while sum(one.num_turns > 1 for one in known.values()) < num:
        assert loop.num_running, "they end, and are not lost"
        loop.take(max_tokens=1, seconds=0.01)
        ahead = {number: one for number, one in known.items() if one.num_turns > 1}
        known |= loop.begun() | ahead
    loop.abort()
    return [replace(start, begun=known.get(n)) for n, start in zip(numbers, begin, strict=True)]


def num_begun(start: Start) -> int:
    return start.begun.num_drawn if start.begun else 0


def played(loop: TurnLoop, begin: list[Any]) -> list[Trajectory]:
    return loop.play(begin, sampling(make_tokenizer(), max_tokens=WIDTH), OPEN)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (COUNT, {}),
        (COUNT, {"history": "as_template", "template": SHORTENS}),
        pytest.param(AGENTS, {"agent": "counts"}, marks=pytest.mark.slow),
        (AGENTS, {"agent": "rewrites"}),
    ],
    ids=["environment", "rewritten", "agent", "rewriting agent"],
)
def test_a_lost_trajectory_goes_on_to_the_bits_of_one_that_was_not(
    path: str, more: dict[str, Any], model: Any
) -> None:
    begin = begins(more.pop("agent", ""))
    with loop_of(path, model, **more) as loop:
        expected = played(loop, begin)
    with loop_of(path, model, **more) as loop:
        begun = lost(loop, begin)
    with loop_of(path, model, **more) as loop:
        found = played(loop, begun)
    same_bits(found, expected)
    for one, other in zip(found, expected, strict=True):
        assert one.sample.segments == other.sample.segments
        assert (one.ended, one.num_turns, one.reasons) == ("terminated", 3, other.reasons)
        assert (one.attempts, one.given_up) == (1, {})
    on = [one for one in found if one.start.begun and one.start.begun.num_turns > 1]
    assert len(on) >= NUM // 2
    assert all(drawn_of(one).sum() > one.start.begun.num_drawn for one in on if one.start.begun)


def test_newer_weights_draw_what_comes_after_the_lost_turns(model: Any) -> None:
    with loop_of(COUNT, model) as loop:
        begun = lost(loop, begins())
    with loop_of(COUNT, model, version=4) as loop:
        for one, start in zip(played(loop, begun), begun, strict=True):
            versions, num = one.sample.versions[drawn_of(one)].tolist(), num_begun(start)
            assert versions == [3] * num + [4] * (len(versions) - num)


@pytest.mark.parametrize("game", ["Clock", "FailsAgain", "EndsAgain"])
def test_one_whose_environment_answers_otherwise_begins_anew_and_its_tokens_are_counted(
    game: str, model: Any, tmp_path: Any
) -> None:
    kwargs = {} if game == "Clock" else {"file": str(tmp_path / "begun")}
    with loop_of(f"{HERE}:{game}", model, kwargs=kwargs) as loop:
        begun = lost(loop, begins(), NUM)
        tmp_path.joinpath("begun").touch()
    with loop_of(f"{HERE}:{game}", model, kwargs=kwargs, retries=0, version=4) as loop:
        for one, start in zip(played(loop, begun), begun, strict=True):
            assert (one.problem, one.attempts) == ("", 1)
            assert one.given_up == {NOT_AGAIN: num_begun(start)}
            assert set(one.sample.versions.tolist()) == {-1, 4}


def test_what_was_given_up_before_a_loss_stays_counted_and_no_fault_strikes_twice(
    model: Any,
) -> None:
    begin, long = begins(faults=Faults(kill_environment=0.4, seed=6)), {"turns": 6}
    with loop_of(COUNT, model, kwargs=long) as loop:
        expected = played(loop, begin)
    with loop_of(COUNT, model, kwargs=long) as loop:
        begun = lost(loop, begin, NUM)
    with loop_of(COUNT, model, kwargs=long) as loop:
        found = played(loop, begun)
    same_bits(found, expected)
    assert [one.attempts for one in found] == [one.attempts for one in expected]
    assert [one.faults for one in found] == [one.faults for one in expected]
    assert [one.given_up for one in found] == [one.given_up for one in expected]
    again = [start.begun.given_up[GIVEN_UP] for start in begun if start.begun]
    assert 0 < sum(bool(num) for num in again) < len(again)
