"""Engines with int8 weights: their samples and weights, before and after a sleep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout_engines import (
    PROMPT,
    RESPONSE,
    assert_same,
    load,
    make_prompts,
    requests_of,
    settings,
    trainer_log_probs,
)
from verl_like.errors import RolloutError, WeightSyncError
from workers.config import ModelConfig
from workers.models.load import load_model
from workers.models.quantize import Int8Weight
from workers.rollout.base import EngineLimits
from workers.rollout.hf import HFRolloutEngine
from workers.rollout.native.engine import NativeRolloutEngine
from workers.weights.full_weights import checksum_of

LIMITS = EngineLimits(prompt_width=PROMPT, response_width=RESPONSE, kv_cache_gib=1.0)


def engine_of(name: str, model: Any, folder: Path) -> Any:
    """Return an engine with int8 weights, as after a sync."""
    module = load_model(ModelConfig(path=str(folder)), "token", quantization="int8")
    engine: Any
    if name == "hf":
        engine = HFRolloutEngine(module, LIMITS)
    else:
        engine = NativeRolloutEngine(module, LIMITS, owns_weights=True)
    load(engine, model, 1)
    return engine


@pytest.fixture(scope="module", params=["native", "hf"])
def engine(request: pytest.FixtureRequest, model: Any, folder: Path) -> Any:
    return engine_of(request.param, model, folder)


def test_log_probs_are_near_those_of_the_model(engine: Any, model: Any) -> None:
    outputs = engine.generate(requests_of(make_prompts(), n=2), settings())
    gaps = torch.cat([(trainer_log_probs(model, o) - o.log_probs).abs() for o in outputs])
    assert 1e-4 < float(gaps.mean()) < 0.03
    assert float(gaps.max()) < 0.2


def test_a_sample_has_the_same_bits_among_others(model: Any, folder: Path) -> None:
    engine = engine_of("native", model, folder)
    requests = requests_of(make_prompts(), n=2)
    together = engine.generate(requests, settings())
    assert engine.direct_agrees
    for request, output in list(zip(requests, together, strict=True))[::3]:
        (single,) = engine.generate([request], settings())
        assert_same(single, output, engine)


def test_the_checksum_covers_the_sent_weights_and_any_later_change(engine: Any, model: Any) -> None:
    arrived = checksum_of(model.named_parameters())
    assert engine.weights_checksum() == arrived
    assert checksum_of(engine.named_weights()) != arrived  # the int8 weights

    weight = engine.module.get_parameter("model.layers.0.mlp.up_proj.weight")
    weight.numbers[0, 0] += 1
    assert engine.weights_checksum() != arrived
    weight.numbers[0, 0] -= 1
    weight.scales[2] *= 2
    assert engine.weights_checksum() != arrived
    weight.scales[2] /= 2

    norm = engine.module.get_parameter("model.norm.weight")
    with torch.no_grad():
        norm[0] += 1
        assert engine.weights_checksum() != arrived
        norm[0] -= 1
    assert engine.weights_checksum() == arrived


def test_a_sleeping_engine_stores_nothing_until_the_next_sync(engine: Any, model: Any) -> None:
    first = engine.generate(requests_of(make_prompts()), settings())
    engine.sleep()
    for weight in engine.module.parameters():
        parts = [weight.numbers, weight.scales] if isinstance(weight, Int8Weight) else [weight]
        assert all(part.numel() == 0 for part in parts)
    engine.wake_up()
    with pytest.raises(RolloutError, match="no verified weights"):
        engine.generate(requests_of(make_prompts()), settings())
    load(engine, model, 2)
    second = engine.generate(requests_of(make_prompts()), settings())
    for before, after in zip(first, second, strict=True):
        assert torch.equal(before.log_probs, after.log_probs)


def test_a_tensor_that_does_not_fit_is_rejected_by_name(engine: Any, model: Any) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"
    tensors = {n: weight.detach() for n, weight in model.named_parameters()}
    tensors[name] = tensors[name][1:]
    with pytest.raises(WeightSyncError, match=f"of another shape: {name}"):
        engine.load_weights(tensors.items())
    load(engine, model, 3)
