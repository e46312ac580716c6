"""The native engine decodes its classes of models correctly, and rejects the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.workers.models.architectures import build_tiny, tiny_model_config
from verl_like.errors import ConfigError
from workers.models.support import proof as model_proof
from workers.models.support.stand_in import stand_in
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.native import module_forward
from workers.rollout.native.engine import NativeEngine
from workers.rollout.sample import Sample

PROMPT, RESPONSE = 32, 40


def engine_of(module: Any) -> NativeEngine:
    limits = EngineLimits(prompt_width=PROMPT, response_width=RESPONSE)
    engine = NativeEngine(module, limits, owns_weights=False)
    engine.commit(0)
    return engine


def test_what_is_taken_is_decoded_as_transformers_computes_it() -> None:
    module = build_tiny(tiny_model_config("llama+yarn"))
    prompts = [[6 + (7 + row) * place % 120 for place in range(1 + 9 * row)] for row in range(4)]
    requests = [Sample(prompt, row, f"row {row}") for row, prompt in enumerate(prompts)]
    sampling = SamplingParams(max_tokens=RESPONSE, stop_token_ids=(), do_sample=False)
    for prompt, output in zip(prompts, engine_of(module).generate(requests, sampling), strict=True):
        with torch.no_grad():
            logits = module(torch.tensor([[*prompt, *output.tokens]])).logits[0]
        steps = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert output.tokens.tolist() == steps.argmax(-1).tolist()
        torch.testing.assert_close(output.log_probs, steps.amax(-1), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("case", ["gpt_neo", "gemma3n_text", "mamba", "roberta"])
def test_what_is_not_decoded_right_is_refused_with_the_engines_to_choose(case: str) -> None:
    module = build_tiny(tiny_model_config(case))
    with pytest.raises(ConfigError, match=r"rollout\.name=hf or vllm") as error:
        engine_of(module)
    assert repr(module.config.get_text_config().model_type) in str(error.value)


@pytest.mark.parametrize("case", ["mistral", "phi3+longrope"])
def test_limits_that_no_row_of_the_run_passes_do_not_matter(case: str) -> None:
    config = build_tiny(tiny_model_config(case)).config
    assert module_forward.native_problem(config, longest=16) == ""
    assert "up to 17 tokens" in module_forward.native_problem(config, longest=17)


def test_what_is_found_out_holds_for_all_rows_that_pass_the_same_limits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = []

    def noted(*arguments: Any) -> Any:
        built.append(arguments)
        return stand_in(*arguments)

    monkeypatch.setattr(model_proof, "stand_in", noted)
    model_proof._answer_of.cache_clear()
    config = build_tiny(tiny_model_config("mistral")).config
    for longest in (17, 30, 90):
        assert f"up to {longest} tokens" in module_forward.native_problem(config, longest)
    for longest in (9, 16):
        assert module_forward.native_problem(config, longest) == ""
    assert len(built) == 2


def test_a_class_without_a_small_model_is_not_believed() -> None:
    config = tiny_model_config("llama")
    config.num_hidden_layers, config.hidden_size = 0, -1
    assert "no small model" in module_forward.native_problem(config, longest=20)


def test_layers_that_are_passed_several_times_have_a_cache_for_each_pass() -> None:
    config = build_tiny(tiny_model_config("hrm_text")).config
    assert config.num_hidden_layers == 8 * config.num_layers_per_stack
    assert module_forward.native_problem(config, 96) == ""


def test_layers_that_share_keys_and_values_may_lose_samples_in_mid_generation() -> None:
    config = tiny_model_config("gemma3n_text")
    config.sliding_window = PROMPT + RESPONSE
    module = build_tiny(config)
    assert config.num_kv_shared_layers == 1
    requests = [Sample([7 + row, 9, 30], row, f"row {row}") for row in range(4)]
    sampling = SamplingParams(max_tokens=RESPONSE, stop_token_ids=(), do_sample=False)
    engine = engine_of(module)
    expected_samples = engine.generate(requests, sampling)
    stops = (int(expected_samples[0].tokens[4]),)  # the first row leaves before the others
    sampling = SamplingParams(max_tokens=RESPONSE, stop_token_ids=stops, do_sample=False)
    lengths = set()
    for expected, output in zip(expected_samples, engine.generate(requests, sampling), strict=True):
        tokens = output.tokens.tolist()
        assert tokens == expected.tokens.tolist()[: len(tokens)]
        lengths.add(len(tokens))
    assert len(lengths) > 1
