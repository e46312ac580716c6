"""Each token of a trajectory has the experts of the engine's last pass over it."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from tests.workers.agents.test_loop import HERE, new_loop, sampling_of, starts
from tests.workers.agents.test_segments import SHORTENS
from tests.workers.models.test_routing import model_of
from tests.workers.rollout.test_routed_experts import choices
from trainer.cli.make_tiny import make_tokenizer
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.trajectory import Trajectory
from workers.rollout.base import EngineLimits

LIMITS = EngineLimits(prompt_width=16, response_width=160, kv_cache_gib=0.5)


@pytest.fixture(scope="module")
def model() -> Any:
    width = LIMITS.prompt_width + LIMITS.response_width
    vocab_size = len(make_tokenizer())
    return model_of("qwen3-moe", vocab_size=vocab_size, max_position_embeddings=2 * width)


def assert_routed(model: Any, trajectory: Trajectory) -> None:
    """Check the experts of every segment, for all tokens up to the last sampled one."""
    sample = trajectory.sample
    prompt_length = len(sample.prompt)
    row = [*sample.prompt, *sample.tokens.tolist()]
    is_sampled = [False] * prompt_length + (sample.versions >= 0).tolist()
    begins = [0, *(prompt_length + begin for begin in sample.segments)]
    ends = [*begins[1:], len(row)]
    for begin, end in zip(begins, ends, strict=True):
        last = max((place for place in range(begin, end) if is_sampled[place]), default=begin)
        if last > begin:
            experts = sample.routed_experts[begin:last].sort(dim=-1).values
            assert torch.equal(experts, choices(model, row[begin:last]))


@pytest.mark.parametrize("history", ["sampled", "retokenized"])
def test_every_turn_has_the_experts_of_its_context(model: Any, history: str) -> None:
    tokenizer = make_tokenizer()
    if history == "retokenized":
        tokenizer.chat_template = SHORTENS
    with closing(EnvironmentHost(EnvironmentSpec(f"{HERE}:Count"), 60.0)) as host:
        loop = new_loop(model, tokenizer, host, LIMITS, retries=1, history_tokens=history)
        sampling = sampling_of(tokenizer, LIMITS.response_width, routed_experts=True)
        trajectories = loop.play(starts(0, 4), sampling, 64)
    assert any(trajectory.num_turns > 2 for trajectory in trajectories)
    has_segments = any(trajectory.sample.segments for trajectory in trajectories)
    assert has_segments == (history == "retokenized")
    for trajectory in trajectories:
        assert_routed(model, trajectory)
