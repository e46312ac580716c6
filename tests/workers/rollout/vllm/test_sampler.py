"""Our sampler in vLLM's runner: its host copies per step, and the entries of its tables."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workers.rollout.base import SamplingParams
from workers.rollout.sampling import sample_tokens, uniforms
from workers.rollout.vllm import worker
from workers.rollout.vllm.worker import STEPS_BEHIND, NoiseSampler

VOCABULARY, PROMPT, MOST = 1000, 5, 3 * STEPS_BEHIND


class Requests(dict[str, Any]):
    """The runner's requests, with a count of look-ups."""

    num_lookups = 0

    def __getitem__(self, name: str) -> Any:
        self.num_lookups += 1
        return super().__getitem__(name)


class Runner:
    """Stands for vLLM's model runner: its requests, each with some generated tokens."""

    def __init__(self, num_requests: int, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.facts = [
            {"row": num_requests - 1 - n, "key": (n + 1) << 61, "made": 2 * n}
            for n in range(num_requests)
        ]
        self.requests = Requests()
        for n, facts in enumerate(self.facts):
            self.requests[f"{n}"] = SimpleNamespace(
                sampling_params=SimpleNamespace(extra_args=facts)
            )
        prompts = np.full(num_requests, PROMPT, dtype=np.int32)
        self.input_batch = SimpleNamespace(
            req_ids=list(self.requests),
            num_prompt_tokens=prompts,
            num_tokens_no_spec=prompts.copy(),
        )


@pytest.fixture
def vllm_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = SimpleNamespace(SamplerOutput=SimpleNamespace)
    for name in ("vllm", "vllm.v1", "vllm.v1.outputs"):
        monkeypatch.setitem(sys.modules, name, outputs)


def started_sampler(runner: Runner, **settings: Any) -> NoiseSampler:
    sampler = NoiseSampler(runner, torch.nn.Identity())
    sampling = SamplingParams(max_tokens=MOST, stop_token_ids=(0,), **settings)
    sampler.begin(sampling, len(runner.requests))
    return sampler


def step(sampler: NoiseSampler, logits: Tensor) -> Tensor:
    """Run one pass, after which every request has another token."""
    tokens: Tensor = sampler(logits, None).sampled_token_ids
    sampler.runner.input_batch.num_tokens_no_spec += 1
    return tokens[:, 0]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}, {"do_sample": False}])
@pytest.mark.usefixtures("vllm_outputs")
def test_a_step_waits_for_no_copy_and_looks_up_only_new_requests(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses to copy a tensor from `meta` to host memory."""
    copies: list[Tensor] = []

    def on_its_way(tensor: Tensor) -> tuple[Tensor, None]:
        copies.append(tensor)
        return torch.zeros(tensor.shape), None

    monkeypatch.setattr(worker, "arriving", on_its_way)
    runner = Runner(3, "meta")
    sampler = started_sampler(runner, **settings)
    for _ in range(4):
        step(sampler, torch.zeros(3, VOCABULARY, device="meta"))
    assert runner.requests.num_lookups == 3, "once each"
    assert [copy.shape for copy in copies] == [(3, 1)] * 4


@pytest.mark.usefixtures("vllm_outputs")
def test_the_tables_contain_every_draw_of_every_version() -> None:
    runner = Runner(3)
    sampler = started_sampler(runner)
    num_steps = 2 * STEPS_BEHIND + 7
    generator = torch.Generator().manual_seed(0)
    keys = np.array([facts["key"] for facts in runner.facts], dtype=np.uint64)
    made = np.array([facts["made"] for facts in runner.facts])
    expected = torch.zeros(3, MOST + 1, 1)
    for number in range(num_steps):
        logits = torch.randn(3, VOCABULARY, generator=generator)
        sampler.version = number // 10
        noise = torch.from_numpy(uniforms(keys, made + number))
        tokens, log_probs = sample_tokens(logits, noise, sampler.sampling)
        assert step(sampler, logits).tolist() == tokens.tolist()
        for n, facts in enumerate(runner.facts):
            expected[facts["row"], made[n] + number] = log_probs[n]
    sampler.write_pending()
    assert torch.equal(sampler.log_probs, expected)
    assert sampler.versions[2, :num_steps].tolist() == [n // 10 for n in range(num_steps)]


@pytest.mark.usefixtures("vllm_outputs")
def test_draws_after_the_last_token_of_a_sample_change_no_other() -> None:
    runner = Runner(2)
    sampler = started_sampler(runner)
    runner.input_batch.num_tokens_no_spec += MOST
    step(sampler, torch.zeros(2, VOCABULARY))
    sampler.write_pending()
    assert not sampler.log_probs[:, :MOST].any()


@pytest.mark.usefixtures("vllm_outputs")
def test_a_request_that_replaces_another_is_looked_up() -> None:
    runner = Runner(2)
    sampler = started_sampler(runner)
    logits = torch.zeros(2, VOCABULARY)
    first = step(sampler, logits).tolist()
    runner.input_batch.num_tokens_no_spec -= 1
    runner.input_batch.req_ids = ["1", "0"]
    assert step(sampler, logits).tolist() == first[::-1]
