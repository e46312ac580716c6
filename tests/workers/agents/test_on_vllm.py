"""Trajectories on vLLM: tools, log-probs, and cached prefixes of older weights."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.workers.agents.test_loop import HERE, sampled_mask, sampling_of, starts
from tests.workers.rollout_engines import load
from trainer.cli.make_tiny import make_model
from workers.agents.chat import TurnRenderer
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.players import TurnLoop
from workers.config import EnvironmentConfig
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.sample import Sample

pytestmark = pytest.mark.vllm

BLOCK = 32
"""Tokens that vLLM caches together."""
PROMPT, WIDTH = 16, 200
CALL = '{"name": "add", "arguments": {"a": 20, "b": 22}}'


@pytest.fixture(scope="module")
def models(tokenizer: Any) -> list[Any]:
    return [make_model(tokenizer, seed, hidden_size=128).eval() for seed in range(2)]


@pytest.fixture(scope="module")
def engine(tokenizer: Any, models: list[Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.setup import VllmSettings

    gc.collect()  # an older engine that is collected later would end this engine's process groups
    folder = tmp_path_factory.mktemp("vllm")
    models[0].save_pretrained(folder)
    limits = EngineLimits(PROMPT, WIDTH, max_num_seqs=16, kv_cache_gib=1.0)
    return VllmRolloutEngine(VllmSettings(str(folder), options={"block_size": BLOCK}), limits)


@pytest.fixture
def host() -> Iterator[EnvironmentHost]:
    host = EnvironmentHost(EnvironmentSpec(f"{HERE}:Count", tools=[f"{HERE}:add"]), 60.0)
    yield host
    host.close()


def expected_log_probs(model: Any, sample: Sample) -> torch.Tensor:
    ids = torch.tensor([[*sample.prompt, *sample.tokens.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(sample.prompt) - 1 : -1]
    log_probs: torch.Tensor = logits.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
    return log_probs


def test_trajectories_call_tools_and_have_the_trainers_log_probs(
    engine: Any,
    host: EnvironmentHost,
    tokenizer: Any,
    models: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first four responses count as calls, whatever was sampled."""
    load(engine, models[0], 3)
    stops, responses = (tokenizer.eos_token_id,), []

    def text_of(ids: list[int]) -> str:
        responses.append(ids)
        return CALL if len(responses) <= 4 else "go on"

    config = EnvironmentConfig(max_tokens_per_turn=20, step_timeout_s=60.0, retries=0)
    chat = TurnRenderer(tokenizer, [], stops)
    monkeypatch.setattr(chat, "text_of", text_of)
    loop = TurnLoop(engine, host, chat, config)
    sampling = sampling_of(tokenizer, WIDTH, top_k=20, truncated_log_probs=True)
    trajectories = loop.play(starts(0, 4), sampling, num_open=4)
    assert sum(trajectory.num_calls for trajectory in trajectories) == 4
    assert sum(trajectory.num_call_errors for trajectory in trajectories) == 0
    for trajectory in trajectories:
        sample, is_sampled = trajectory.sample, sampled_mask(trajectory)
        num_calls = trajectory.num_calls
        assert (trajectory.ended, trajectory.problem) == ("terminated", "")
        assert trajectory.num_turns == 3 + num_calls
        assert tokenizer.decode(sample.tokens[~is_sampled]).count("42") == num_calls
        expected = expected_log_probs(models[0], sample)[is_sampled]
        torch.testing.assert_close(sample.log_probs[is_sampled], expected, atol=1e-4, rtol=0)
        assert sample.truncated_log_probs is not None
        assert sample.truncated_log_probs.isnan().tolist() == (~is_sampled).tolist()


@pytest.mark.parametrize("keep_kv_cache", [False, True])
def test_no_turn_reuses_a_prefix_computed_by_older_weights(
    engine: Any, models: list[Any], monkeypatch: pytest.MonkeyPatch, keep_kv_cache: bool
) -> None:
    """The weights arrive while another sample runs, so vLLM keeps its cache."""
    monkeypatch.setattr(engine, "limits", replace(engine.limits, keep_kv_cache=keep_kv_cache))
    load(engine, models[0], 3)
    sampling = SamplingParams(max_tokens=WIDTH, stop_token_ids=())
    (first,) = engine.generate([Sample([7, 8, 9], seed=1, end_at=3 * BLOCK)], sampling)
    engine.submit([Sample([10], seed=2)], sampling)
    engine.collect(max_tokens=1)
    load(engine, models[1], 4)
    gap = torch.tensor([torch.nan])
    second = replace(
        first,
        tokens=torch.cat([first.tokens, torch.tensor([9])]),
        log_probs=torch.cat([first.log_probs, gap]),
        versions=torch.cat([first.versions, torch.tensor([-1], dtype=torch.int32)]),
        finish_reason="abort",
        end_at=3 * BLOCK + 9,
    )
    (number,) = engine.submit([second], sampling)
    sample = engine.collect()[number]
    begun = len(second.tokens)
    expected = expected_log_probs(models[1], sample)[begun:]
    torch.testing.assert_close(sample.log_probs[begun:], expected, atol=1e-4, rtol=0)
