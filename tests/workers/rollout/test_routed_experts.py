"""The experts of a rollout's tokens are those of a pass over the whole row."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.models.test_routing import model_of
from tests.workers.prompts import prompt_batch
from tests.workers.rollout_engines import EmptyEngine, assert_same
from verl_like.errors import ConfigError, RolloutError
from workers.config import RolloutConfig
from workers.models.routing import Routers
from workers.rollout.base import EngineLimits, RolloutEngine, SamplingParams
from workers.rollout.build_engine import check_notes_routing
from workers.rollout.hf import HFRolloutEngine
from workers.rollout.native.engine import NativeRolloutEngine
from workers.rollout.sample import Sample, to_batch

LIMITS = EngineLimits(prompt_width=6, response_width=12, max_num_seqs=3, kv_cache_gib=1.0)
SAMPLING = SamplingParams(max_tokens=12, stop_token_ids=(2, 5), routed_experts=True)
SAMPLES = [Sample(list(range(8, 8 + n)), 100 + n, f"sample {n}") for n in (1, 6, 3, 4, 2)]


@pytest.fixture(scope="module", params=["deepseek-v3", "gpt-oss"])
def model(request: pytest.FixtureRequest) -> Any:
    window = {"sliding_window": 64} if request.param == "gpt-oss" else {}
    return model_of(request.param, **window)


def engine_of(name: str, model: Any, **limits: Any) -> RolloutEngine:
    module, own_limits = copy.deepcopy(model), replace(LIMITS, **limits)
    engine: RolloutEngine
    if name == "hf":
        engine = HFRolloutEngine(module, own_limits)
    else:
        engine = NativeRolloutEngine(module, own_limits, owns_weights=True)
    engine.commit(1)
    return engine


@torch.no_grad()
def choices(model: Any, ids: list[int]) -> Tensor:
    """Return the model's choices in one pass over these tokens, in any order."""
    with Routers(model).recording() as passes:
        model(torch.tensor([ids]), use_cache=False)
        return passes.pop_choices().sort(dim=-1).values


def assert_chosen(model: Any, sample: Sample) -> None:
    """Check the choices of every token but the last, which no pass has read."""
    row = [*sample.prompt, *sample.tokens.tolist()]
    assert sample.routed_experts is not None
    assert len(sample.routed_experts) == len(row) - 1
    assert torch.equal(sample.routed_experts.sort(dim=-1).values, choices(model, row[:-1]))


@pytest.mark.parametrize("name", ["native", "hf"])
def test_every_token_that_was_read_has_its_experts(name: str, model: Any) -> None:
    engine = engine_of(name, model)
    plain = engine.generate(SAMPLES, replace(SAMPLING, routed_experts=False))
    outputs = engine.generate(SAMPLES, SAMPLING)
    for sample, expected in zip(outputs, plain, strict=True):
        assert_same(sample, expected, engine)
        assert expected.routed_experts is None
        assert_chosen(model, sample)


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize("keep_kv_cache", [False, True], ids=["recomputed", "kept"])
def test_a_resumed_sample_has_the_experts_of_its_cache(
    name: str, keep_kv_cache: bool, model: Any
) -> None:
    engine = engine_of(name, model, keep_kv_cache=keep_kv_cache)
    expected = {sample.name: sample for sample in engine.generate(SAMPLES, SAMPLING)}
    engine.submit(SAMPLES, SAMPLING)
    finished = list(engine.collect(max_tokens=3).values())
    engine.submit(list(engine.abort().values()), SAMPLING)
    engine.collect(max_tokens=2)
    engine.commit(2)  # the same weights under another name
    finished += engine.collect().values()
    for sample in finished:
        assert torch.equal(sample.tokens, expected[sample.name].tokens)
        assert_chosen(model, sample)


def test_the_column_of_experts_has_a_row_for_every_token(model: Any) -> None:
    engine = engine_of("native", model)
    prompts = prompt_batch(3)
    masks = prompts.batch["attention_mask"].bool()
    ids = prompts.batch["input_ids"]
    requests = [Sample(row[mask].tolist(), 7) for row, mask in zip(ids, masks, strict=True)]
    outputs = engine.generate(requests, SAMPLING)
    empty, pads = engine.no_choices(), [Sample([0], finish_reason="pad")]
    batch = to_batch([*outputs, *pads], (6, 12), 0, 1, no_choices=empty)
    column = batch.column("routed_experts")
    assert torch.equal(column.lengths, batch.column("input_ids").lengths)
    for row, output in zip(column.rows(), outputs, strict=False):
        assert torch.equal(row[:-1], output.routed_experts)
        assert not row[-1].any()

    cut = replace(outputs[0], name="uid 3", routed_experts=outputs[0].routed_experts[:-1])
    with pytest.raises(RolloutError, match="uid 3 has the experts of .* tokens"):
        to_batch([cut], (6, 12), 0, 1, no_choices=empty)


class PlainEngine(EmptyEngine):
    """A user's engine that records no choices."""

    def __init__(self, module: Any, limits: EngineLimits, *, decode: Any = None) -> None:
        super().__init__(limits, decode)


def test_an_engine_that_records_no_experts_is_rejected() -> None:
    engine = EmptyEngine(LIMITS)
    engine.vocab_size = 64
    with pytest.raises(ConfigError, match="EmptyEngine does not record which experts"):
        engine._check_sampling(SAMPLING)
    user_engine = RolloutConfig(name=f"{PlainEngine.__module__}.PlainEngine")
    with pytest.raises(ConfigError, match="PlainEngine does not record which experts"):
        check_notes_routing(user_engine)
    server = RolloutConfig(name="vllm", server_urls=["http://here:8000"])
    with pytest.raises(ConfigError, match="a vLLM server does not record which experts"):
        check_notes_routing(server)
    for name in ("native", "hf", "vllm", "workers.rollout.hf.HFRolloutEngine"):
        check_notes_routing(RolloutConfig(name=name))


def test_routed_experts_of_a_dense_model_are_rejected() -> None:
    engine = engine_of("native", model_of("llama"))
    with pytest.raises(ConfigError, match="no routed experts"):
        engine.generate(SAMPLES, SAMPLING)
