"""Experts of trajectories: those that each token went to when the engine read it last."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.agents.test_begun import COUNT, LIMITS, NUM, begins, loop_of
from tests.workers.agents.test_segments import SHORTENS
from tests.workers.agents.test_takes import OPEN, sampling
from tests.workers.models.test_routing import model_of
from tests.workers.rollout.test_routed_experts import choices
from trainer.cli.make_tiny import make_tokenizer
from workers.agents.loop import Trajectory, TurnLoop
from workers.rollout.begun import Begun

HISTORIES = [{}, {"history": "as_template", "template": SHORTENS}]


@pytest.fixture(scope="module")
def model() -> Any:
    width = LIMITS.prompt_width + LIMITS.response_width
    vocabulary = len(make_tokenizer())
    return model_of("qwen3-moe", vocab_size=vocabulary, max_position_embeddings=2 * width)


def asked() -> Any:
    return sampling(make_tokenizer(), max_tokens=LIMITS.response_width, routed_experts=True)


def played(loop: TurnLoop, begin: list[Any]) -> list[Trajectory]:
    return loop.play(begin, asked(), OPEN)


def assert_routed(model: Any, one: Trajectory) -> None:
    """In every segment, of all tokens up to the last that was drawn there."""
    sample = one.sample
    first = len(sample.prompt)
    row = [*sample.prompt, *sample.tokens.tolist()]
    drawn = [False] * first + (sample.versions >= 0).tolist()
    begins = [0, *(first + begin for begin in sample.segments)]
    ends = [*begins[1:], len(row)]
    for begin, end in zip(begins, ends, strict=True):
        last = max((place for place in range(begin, end) if drawn[place]), default=begin)
        if last > begin:
            found = sample.routed_experts[begin:last].sort(dim=-1).values
            assert torch.equal(found, choices(model, row[begin:last]))


@pytest.mark.parametrize("more", HISTORIES, ids=["as_drawn", "as_template"])
def test_every_turn_has_the_experts_of_what_it_read(model: Any, more: dict[str, Any]) -> None:
    with loop_of(COUNT, model, **more) as loop:
        found = played(loop, begins())
    assert any(one.num_turns > 2 for one in found)
    assert any(one.sample.segments for one in found) == bool(more)
    for one in found:
        assert_routed(model, one)


@pytest.mark.parametrize("more", HISTORIES, ids=["as_drawn", "as_template"])
def test_a_trajectory_whose_process_was_lost_has_them_too(model: Any, more: dict[str, Any]) -> None:
    with loop_of(COUNT, model, **more) as loop:
        expected = played(loop, begins())
    with loop_of(COUNT, model, **more) as loop:
        numbers = loop.submit(begins(), asked(), OPEN)
        known: dict[int, Begun] = {}
        while sum(one.num_turns > 1 for one in known.values()) < NUM // 2:
            loop.take(max_tokens=1, seconds=0.01)
            known |= loop.begun()
        loop.abort()
    with loop_of(COUNT, model, **more) as loop:
        pairs = zip(numbers, begins(), strict=True)
        found = played(loop, [replace(start, begun=known.get(n)) for n, start in pairs])
    for one, other in zip(found, expected, strict=True):
        assert one.sample.tokens.tolist() == other.sample.tokens.tolist()
        assert_routed(model, one)
