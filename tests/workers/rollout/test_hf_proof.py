"""The hf engine decodes from a cache only if that computes the same as the whole row."""

from __future__ import annotations

import logging

import pytest
import torch

from tests.workers.models.architectures import build_tiny, tiny_model_config
from tests.workers.models.walk import LARGEST_ERROR, decoding_error
from verl_like.errors import ConfigError
from workers.rollout.base import EngineLimits
from workers.rollout.hf import HFRolloutEngine, check_decoding


@pytest.mark.parametrize("case", ["minimax", "recurrent_gemma"])
def test_a_class_whose_cache_is_wrong_is_decoded_without_it(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    module = build_tiny(tiny_model_config(case))
    with torch.no_grad():
        module(torch.arange(6, 30)[None])  # recurrent_gemma leaves its state in the modules
    with caplog.at_level(logging.WARNING):
        engine = HFRolloutEngine(module, EngineLimits(32, 64))
    assert not engine.uses_cache
    assert f"decodes model type {case} without a cache" in caplog.text
    assert decoding_error(engine, module, num_prompts=1) < LARGEST_ERROR


def test_the_models_generation_config_does_not_change_scores() -> None:
    module = build_tiny(tiny_model_config("llama"))
    module.generation_config.repetition_penalty = 3.0
    module.generation_config.no_repeat_ngram_size = 1
    engine = HFRolloutEngine(module, EngineLimits(32, 64))
    assert engine.uses_cache
    assert decoding_error(engine, module, num_prompts=3) < LARGEST_ERROR


def test_rows_longer_than_a_change_of_rotary_factors_are_rejected() -> None:
    module = build_tiny(tiny_model_config("phi3+longrope"))
    with pytest.raises(ConfigError, match=r"first 16 tokens .* 'phi3' .* now 17, to 16 or less"):
        HFRolloutEngine(module, EngineLimits(8, 9))
    HFRolloutEngine(module, EngineLimits(8, 8))


@pytest.mark.slow
def test_a_class_with_its_own_generate_is_decoded_with_the_engines_noise() -> None:
    module = build_tiny(tiny_model_config("janus"))  # its `generate` drops logits processors
    engine = HFRolloutEngine(module, EngineLimits(32, 64))
    assert decoding_error(engine, module, num_prompts=1) < LARGEST_ERROR


def test_a_class_whose_generate_fails_is_rejected_before_a_run() -> None:
    config = build_tiny(tiny_model_config("qwen2_5_omni_thinker")).config
    with pytest.raises(ConfigError, match=r"hf cannot decode model type 'qwen2_5_omni_thinker'"):
        check_decoding(config, 96)
    check_decoding(build_tiny(tiny_model_config("minimax")).config, 96)  # only its cache is wrong
