"""Weights of a mixture of experts on their way to vLLM, which takes them expert by expert."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.distributed import run
from tests.workers.rollout_engines import full_logits, make_prompts, requests_of, settings
from verl_like.errors import WeightSyncError
from workers.models.state import named_state, persistent_buffers
from workers.rollout.base import EngineLimits
from workers.rollout.vllm.handover import Arrivals, Handover
from workers.rollout.vllm.setup import expected_weights
from workers.weights.full_weights import checksum_of

SIZES: dict[str, Any] = dict(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=32,
    num_experts_per_tok=2,
    max_position_embeddings=128,
    initializer_range=0.1,
)
ROUTED = dict(moe_intermediate_size=64)
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=4),
    "qwen2_moe": dict(num_experts=4, shared_expert_intermediate_size=64) | ROUTED,
    "qwen3_moe": dict(num_experts=4, norm_topk_prob=True) | ROUTED,
}


def save_model(folder: Path, family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES | FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for _, buffer in persistent_buffers(model):
        buffer.normal_()
    model.save_pretrained(folder)
    return model


def arrived(handover: Handover, model: Any) -> dict[str, Tensor]:
    return dict(
        handover.checkpoint_tensors((name, weight.detach()) for name, weight in named_state(model))
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_are_sent_one_by_one_with_the_trainers_checksum(
    family: str, tmp_path: Path
) -> None:
    model = save_model(tmp_path, family)
    handover = Handover(expected_weights(str(tmp_path)))
    chunks = arrived(handover, model)
    assert sum("experts.3." in name for name in chunks) == 3 * SIZES["num_hidden_layers"]
    handover.verify([Arrivals(), Arrivals()])
    assert handover.checksum() == checksum_of(named_state(model))


def test_a_name_without_a_place_on_any_rank_is_rejected(tmp_path: Path) -> None:
    model = save_model(tmp_path, "mixtral")
    handover = Handover(expected_weights(str(tmp_path)))
    arrived(handover, model)
    words = {"lm_head.weight": " (KeyError: 'lm_head')"}
    with pytest.raises(WeightSyncError, match="no place for: lm_head.weight .KeyError: 'lm_head'"):
        handover.verify([Arrivals(words), Arrivals(words | {"other": ""})])
    # an expert of another rank is not this one's
    handover.verify([Arrivals(words), Arrivals()])
    with pytest.raises(WeightSyncError, match="1 changed on their way: lm_head.weight"):
        handover.verify([Arrivals(), Arrivals(changed=["lm_head.weight"])])


def log_probs_of_two_versions(folder: Path, family: str) -> list[tuple[Tensor, Tensor]]:
    """Return vLLM's and transformers' log-probs of greedy tokens after each load."""
    from workers.rollout.vllm.engine import VllmRolloutEngine
    from workers.rollout.vllm.setup import VllmSettings

    model = save_model(folder, family)
    limits = EngineLimits(prompt_width=9, response_width=14, max_num_seqs=8, kv_cache_gib=1.0)
    engine = VllmRolloutEngine(VllmSettings(str(folder)), limits)
    prompts, log_probs = make_prompts()[:4], []
    for version in range(2):
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.02 * torch.randn_like(weight))
        engine.load_weights((name, weight.detach()) for name, weight in named_state(model))
        engine.commit(version)
        assert engine.weights_checksum() == checksum_of(named_state(model))

        outputs = engine.generate(requests_of(prompts), settings(do_sample=False))
        for prompt, output in zip(prompts, outputs, strict=True):
            steps = full_logits(model, prompt, output.tokens).log_softmax(-1)
            log_probs.append((output.log_probs, steps.gather(1, output.tokens[:, None])[:, 0]))

    renamed = {"model.norm.scales": torch.ones(128)}
    engine.expected.checkpoint.stored = lambda tensors: iter([*tensors, *renamed.items()])
    with pytest.raises(WeightSyncError, match=r"has no place for: .*model.norm.scales"):
        engine.load_weights((name, weight.detach()) for name, weight in named_state(model))
    return log_probs


@pytest.mark.vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_equals_the_trainer_and_rejects_unknown_names(family: str, tmp_path: Path) -> None:
    """In a separate process: vLLM creates its groups of ranks once per process."""
    (log_probs,) = run(1, log_probs_of_two_versions, tmp_path, family, deadline_s=300)
    for ours, theirs in log_probs:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
