"""vLLM's second model runner next to its first one: the same samples.

Its kernels are in Triton, which has no CPU backend as a wheel, so Triton's interpreter runs them.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.distributed import run
from tests.workers.rollout_engines import (
    load,
    make_model,
    make_prompts,
    requests_of,
    settings,
    trainer_log_probs,
)
from workers.rollout.base import EngineLimits
from workers.rollout.sample import Sample

LIMITS = EngineLimits(prompt_width=9, response_width=14, max_num_seqs=4, kv_cache_gib=1.0)


def interpret_triton() -> None:
    """Make vLLM find a CPU backend of Triton; nothing calls it."""
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))


def sampled(folder: Path, is_second: bool) -> list[tuple[Sample, float]]:
    """Return samples of two versions of the weights, and their gaps to the trainer's log-probs.

    Passes have at most 8 tokens, so vLLM reads longer prompts in several.
    """
    if is_second:
        interpret_triton()
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.setup import VllmSettings

    model = make_model(folder)
    options = {"max_num_batched_tokens": 8}
    engine = VllmRolloutEngine(VllmSettings(str(folder), options=options), LIMITS)
    runner: Any = engine.vllm.llm.llm_engine.model_executor.driver_worker.worker.model_runner
    assert hasattr(runner, "input_batch") != is_second
    results = []
    for version, sampling in enumerate((settings(top_p=0.8), settings(temperature=0.7))):
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(1.1)
        load(engine, model, version)
        for sample in engine.generate(requests_of(make_prompts()), sampling):
            theirs = trainer_log_probs(model, sample, sampling.temperature)
            results.append((sample, float((sample.log_probs - theirs).abs().max())))
    return results


@pytest.mark.vllm
def test_the_second_model_runner_samples_as_the_first(tmp_path: Path) -> None:
    (first,), (second,) = (
        run(1, sampled, tmp_path, is_second, deadline_s=500) for is_second in (False, True)
    )
    assert max(gap for _, gap in second) < 1e-4
    for (ours, _), (theirs, _) in zip(second, first, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.versions.tolist() == theirs.versions.tolist()
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=1e-5, rtol=0)
