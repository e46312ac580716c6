"""The experts that vLLM chooses are recorded for each request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.distributed import run
from tests.workers.rollout.vllm.test_experts import save_model
from tests.workers.rollout_engines import make_prompts, requests_of, settings
from verl_like.errors import ConfigError
from workers.models.routing import Routers
from workers.models.state import named_state
from workers.rollout.base import EngineLimits
from workers.rollout.vllm.worker import ExpertChoices


def choices_of_both(folder: Path, family: str) -> list[tuple[Tensor, Tensor]]:
    """Return vLLM's and transformers' choices by sample; some saw an abort or a new version."""
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.setup import VllmSettings

    model: Any = save_model(folder, family)
    limits = EngineLimits(prompt_width=9, response_width=14, max_num_seqs=4, kv_cache_gib=1.0)
    engine = VllmRolloutEngine(VllmSettings(str(folder), notes_routing=True), limits)
    engine.load_weights((name, weight.detach()) for name, weight in named_state(model))
    engine.commit(0)
    sampling = replace(settings(), routed_experts=True)
    requests = requests_of(make_prompts()[:9])

    outputs = engine.generate(requests, sampling)
    numbers = engine.submit(requests, sampling)
    done = engine.collect(max_tokens=2)
    aborted = engine.abort(numbers[:5])
    engine.commit(1)  # what runs is read again
    done |= engine.collect()
    again = [sample for sample in aborted.values() if sample.finish_reason == "abort"]
    outputs += [*done.values(), *engine.generate(again, sampling)]

    routers, choices = Routers(model), []
    for output in outputs:
        row = torch.tensor([[*output.prompt, *output.tokens.tolist()][:-1]])
        with torch.no_grad(), routers.recording() as passes:
            model(row, use_cache=False)
            theirs = passes.pop_choices()
        assert output.routed_experts is not None
        assert output.routed_experts.dtype == theirs.dtype
        choices.append((output.routed_experts.sort(dim=-1).values, theirs.sort(dim=-1).values))
    return choices


@pytest.mark.vllm
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_of_every_token_equal_those_of_a_pass_over_the_row(
    family: str, tmp_path: Path
) -> None:
    (choices,) = run(1, choices_of_both, tmp_path, family, deadline_s=300)
    assert len(choices) >= 9
    for ours, theirs in choices:
        assert torch.equal(ours, theirs)


@pytest.mark.vllm
def test_the_second_model_runner_records_no_experts() -> None:
    with pytest.raises(ConfigError, match="Leave out VLLM_USE_V2_MODEL_RUNNER or .*router_replay"):
        ExpertChoices(SimpleNamespace())
