"""The hf engine decodes from a cache only if that computes the same as the whole row."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from tests.workers.models.architectures import build_tiny, tiny_model_config
from verl_like.errors import ConfigError
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.hf import HFEngine, cache_problem
from workers.rollout.sample import Sample


def largest_gap(engine: HFEngine, module: Any) -> float:
    """Return the largest gap between log-probs of greedy tokens and of transformers' pass."""
    engine.commit(0)
    prompt = list(range(6, 24))
    sampling = SamplingParams(max_tokens=12, stop_token_ids=(), do_sample=False)
    (output,) = engine.generate([Sample(prompt, 0)], sampling)
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *output.tokens]])
        steps = module(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return float((output.log_probs - steps.amax(-1)).abs().max())


@pytest.mark.parametrize(("case", "has_cache"), [("gemma2", True), ("minimax", False)])
def test_a_class_whose_cache_is_wrong_is_decoded_without_it_and_that_is_said(
    case: str, has_cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = build_tiny(tiny_model_config(case))
    with caplog.at_level(logging.WARNING):
        engine = HFEngine(module, EngineLimits(32, 64))
    assert (cache_problem(module.config, 96) == "") == engine.uses_cache == has_cache
    assert ("decodes model type minimax without a cache" in caplog.text) == (not has_cache)
    assert largest_gap(engine, module) < 1e-4


def test_a_class_that_carries_its_state_from_row_to_row_is_decoded_without_a_cache() -> None:
    module = build_tiny(tiny_model_config("recurrent_gemma"))
    with torch.no_grad():
        module(torch.arange(6, 30)[None])  # leaves its state in the modules
    engine = HFEngine(module, EngineLimits(32, 64))
    assert not engine.uses_cache
    sampling = SamplingParams(max_tokens=8, stop_token_ids=(), do_sample=False)
    engine.commit(0)
    (output,) = engine.generate([Sample([7], 0)], sampling)
    with torch.no_grad():
        ids = torch.tensor([[7, *output.tokens]])
        steps = module(ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    assert float((output.log_probs - steps.amax(-1)).abs().max()) < 1e-4


def test_scores_are_not_changed_by_the_models_own_generation_config() -> None:
    module = build_tiny(tiny_model_config("llama"))
    module.generation_config.repetition_penalty = 3.0
    module.generation_config.no_repeat_ngram_size = 1
    assert largest_gap(HFEngine(module, EngineLimits(32, 64)), module) < 1e-4


def test_rows_that_grow_beyond_a_change_of_rotary_factors_are_refused() -> None:
    module = build_tiny(tiny_model_config("phi3+longrope"))
    with pytest.raises(ConfigError, match=r"first 16 tokens .* 'phi3' .* now 17, to 16 or less"):
        HFEngine(module, EngineLimits(8, 9))
    HFEngine(module, EngineLimits(8, 8))
