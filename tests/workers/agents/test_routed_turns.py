"""Experts of trajectories: those that each token was routed to when the engine last read it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.workers.agents.test_loop import HERE, fresh_engine, starts
from tests.workers.agents.test_segments import SHORTENS
from tests.workers.agents.test_takes import OPEN, sampling
from tests.workers.models.test_routing import model_of
from tests.workers.rollout.test_routed_experts import choices
from tests.workers.rollout_engines import load
from trainer.cli.make_tiny import make_tokenizer
from workers.agents.chat import TurnRenderer
from workers.agents.environment import EnvironmentSpec
from workers.agents.host import EnvironmentHost
from workers.agents.loop import TurnLoop
from workers.agents.trajectory import Trajectory
from workers.config import EnvironmentConfig
from workers.rollout.base import EngineLimits

LIMITS = EngineLimits(prompt_width=16, response_width=160, kv_cache_gb=0.5)
NUM = 4
HISTORIES = [{}, {"history_tokens": "retokenized", "template": SHORTENS}]


@pytest.fixture(scope="module")
def model() -> Any:
    width = LIMITS.prompt_width + LIMITS.response_width
    vocabulary = len(make_tokenizer())
    return model_of("qwen3-moe", vocab_size=vocabulary, max_position_embeddings=2 * width)


@contextmanager
def loop_of(model: Any, template: str = "", **more: Any) -> Iterator[TurnLoop]:
    """Return a loop with an engine and a host of environments."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    config = EnvironmentConfig(max_tokens_per_turn=6, retries=1, **more)
    host = EnvironmentHost(EnvironmentSpec(f"{HERE}:Count", {}), config.step_timeout_s)
    chat, engine = TurnRenderer(tokenizer, [], (2,)), fresh_engine(model, LIMITS)
    load(engine, model, 3)
    try:
        yield TurnLoop(engine, host, chat, config)
    finally:
        host.close()


def asked() -> Any:
    return sampling(make_tokenizer(), max_tokens=LIMITS.response_width, routed_experts=True)


def assert_routed(model: Any, one: Trajectory) -> None:
    """Check the experts of every segment, for all tokens up to the last sampled one."""
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


@pytest.mark.parametrize("more", HISTORIES, ids=["sampled", "retokenized"])
def test_every_turn_has_the_experts_of_what_it_read(model: Any, more: dict[str, Any]) -> None:
    with loop_of(model, **more) as loop:
        found = loop.play(starts(0, NUM), asked(), OPEN)
    assert any(one.num_turns > 2 for one in found)
    assert any(one.sample.segments for one in found) == bool(more)
    for one in found:
        assert_routed(model, one)
