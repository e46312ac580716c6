"""The native engine decodes its classes of models correctly, and rejects the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.models.walk import LARGEST_ERROR, decoding_error
from verl_like.errors import ConfigError
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.native.engine import NativeRolloutEngine
from workers.rollout.native.module_forward import check_decoding
from workers.rollout.sample import Sample

PROMPT, RESPONSE = 32, 40


def engine_of(module: Any) -> NativeRolloutEngine:
    limits = EngineLimits(prompt_width=PROMPT, response_width=RESPONSE)
    engine = NativeRolloutEngine(module, limits, owns_weights=False)
    engine.commit(0)
    return engine


def test_greedy_tokens_and_log_probs_equal_those_of_transformers() -> None:
    module = build_tiny(tiny_model_config("llama+yarn"))
    assert decoding_error(engine_of(module), module, num_prompts=4) < LARGEST_ERROR


@pytest.mark.parametrize("case", ["gpt_neo", "gemma3n_text", "mamba", "roberta"])
def test_classes_that_decode_wrong_are_rejected_with_alternatives(case: str) -> None:
    module = build_tiny(tiny_model_config(case))
    with pytest.raises(ConfigError, match=r"rollout\.name=hf or vllm") as error:
        engine_of(module)
    assert repr(module.config.get_text_config().model_type) in str(error.value)


@pytest.mark.parametrize("case", ["mistral", "phi3+longrope"])
def test_limits_longer_than_any_row_are_ignored(case: str) -> None:
    config = build_tiny(tiny_model_config(case)).config
    check_decoding(config, longest=16)
    with pytest.raises(ConfigError, match="=16, and this run's rows have up to 17 tokens"):
        check_decoding(config, longest=17)


def test_layers_that_run_several_times_have_a_cache_for_each_pass() -> None:
    config = build_tiny(tiny_model_config("hrm_text")).config
    assert config.num_hidden_layers == 8 * config.num_layers_per_stack
    check_decoding(config, 96)


def test_samples_may_leave_layers_that_share_keys_and_values() -> None:
    config = tiny_model_config("gemma3n_text")
    config.sliding_window = PROMPT + RESPONSE
    module = build_tiny(config)
    assert config.num_kv_shared_layers == 1
    requests = [Sample([7 + row, 9, 30], row, f"row {row}") for row in range(4)]
    sampling = SamplingParams(max_tokens=12, stop_token_ids=(), do_sample=False)
    engine = engine_of(module)
    expected_samples = engine.generate(requests, sampling)
    stops = (int(expected_samples[0].tokens[4]),)  # the first row leaves before the others
    samples = engine.generate(requests, replace(sampling, stop_token_ids=stops))
    lengths = set()
    for expected, output in zip(expected_samples, samples, strict=True):
        tokens = output.tokens.tolist()
        assert tokens == expected.tokens.tolist()[: len(tokens)]
        lengths.add(len(tokens))
    assert len(lengths) > 1
