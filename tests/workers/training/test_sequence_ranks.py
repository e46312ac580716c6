"""Whole updates with the tokens of a row on several ranks, against one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import (
    VOCAB,
    learned,
    make_batch,
    started,
    tiny_config,
)
from tests.workers.training.three_updates import chunk_of, three_updates
from verl_like.errors import ConfigError
from workers.config import OptimConfig, ParallelConfig
from workers.models.support.proof import Support
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.microbatch import MicroBatchBudget
from workers.training.row_proof import check_split

NUM_ROWS = 7
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = {"sliding_window": 4}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2, one head of keys": ("Qwen2Config", {"num_key_value_heads": 1}),
    "qwen3": ("Qwen3Config", {"tie_word_embeddings": True}),
    "gemma-2": ("Gemma2Config", {"attn_logit_softcapping": 2.0, **WINDOW}),
    "gemma-3": ("Gemma3TextConfig", WINDOW),
    "phi-3": ("Phi3Config", WINDOW),
    "gpt-neox": ("GPTNeoXConfig", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, **EXPERTS}),
    "qwen3-moe": ("Qwen3MoeConfig", {"num_experts": 4, **EXPERTS}),
    "deepseek-v3": ("DeepseekV3Config", {**EXPERTS, **LATENT}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, **EXPERTS, **WINDOW}),
    "outnumbered heads": (
        "LlamaConfig",
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32},
    ),
}
WITH_ROUTER_LOSS = ("mixtral", "qwen3-moe")
CHANGES: dict[str, dict[str, Any]] = {
    "three micro-batches": {"rows": 3},
    "one micro-batch": {"rows": NUM_ROWS},
    "tokens": {"tokens": 40},
    "checkpointing": {"rows": 3, "enable_gradient_checkpointing": True},
    "over other rows, too": {"rows": 2, "sp": 2},
    "whole weights": {"rows": 3, "strategy": "ddp"},
    "lora": {"rows": 3, "lora_rank": 4, "target_modules": "all-linear"},
}
QUICK = [("gemma-2", 2, "three micro-batches"), ("qwen3-moe", 2, "three micro-batches")]
QUICK += [
    ("llama", 4, "over other rows, too"),
    ("gpt-oss", 2, "checkpointing"),
    ("outnumbered heads", 2, "tokens"),
]


def cells() -> list[Any]:
    found = []
    for family in FAMILIES:
        for num_ranks in (2, 4):
            for change in CHANGES:
                quick = (family, num_ranks, change) in QUICK
                marks = [] if quick else [pytest.mark.slow]
                found.append(pytest.param(family, num_ranks, change, marks=marks))
    return found


def saved(folder: Path, family: str, **more: Any) -> Path:
    """The folder of a small model, whose state is off its defaults."""
    import transformers

    name, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **own, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "model")
    return folder


def trained(folder: Path, family: str, change: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs, gradients and three updates of actor and critic."""
    change, world = dict(change), int(os.environ.get("WORLD_SIZE", "1"))
    rows, tokens = change.pop("rows", None), change.pop("tokens", None)
    config = tiny_config(folder, ppo_mini_batch_size=NUM_ROWS, entropy_coeff=0.01)
    actor_section = config.actor_rollout_ref.actor
    actor_section.optim, config.critic.optim = OptimConfig(lr=1e-4, eps=1e-4), {"lr": 1e-4}
    actor_section.use_dynamic_bsz = rows is None
    if rows is None:
        actor_section.ppo_max_token_len_per_gpu = tokens
    else:
        actor_section.ppo_micro_batch_size_per_gpu = rows
    if family in WITH_ROUTER_LOSS and "lora_rank" not in change:
        actor_section.router_aux_loss_coef = 0.5
    sp = min(change.pop("sp", world), world)
    actor_section.strategy = change.pop("strategy", "fsdp")
    config.parallel = ParallelConfig(sp=sp)
    for name, value in change.items():
        setattr(config.actor_rollout_ref.model, name, value)

    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    budget = MicroBatchBudget(rows=rows) if rows else MicroBatchBudget(tokens=tokens)
    return three_updates(actor, critic, chunk_of(actor, NUM_ROWS), budget)


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the relative distance of all tensors together."""
    assert found.keys() == expected.keys()
    ours = torch.cat([found[name].flatten() for name in expected])
    theirs = torch.cat([tensor.flatten() for tensor in expected.values()])
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize(("family", "num_ranks", "change"), cells())
def test_ranks_that_share_rows_train_as_one(
    tmp_path: Path, family: str, num_ranks: int, change: str
) -> None:
    folder, how = saved(tmp_path, family), CHANGES[change]
    alone = trained(folder, family, how)
    if how.get("tokens"):
        how = {"tokens": how["tokens"] // num_ranks}  # a rank's
    for result in run_kept(num_ranks, trained, folder, family, how, deadline_s=150):
        expected = alone["log_probs"][result["rows"]]
        torch.testing.assert_close(result["log_probs"], expected, atol=1e-6, rtol=0)
        for role in ("", "critic_"):
            assert distance(result[f"{role}gradients"], alone[f"{role}gradients"]) < 2e-6
            assert distance(result[f"{role}weights"], alone[f"{role}weights"]) < 1e-6
            for ours, theirs in zip(result[f"{role}metrics"], alone[f"{role}metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 16,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 6.0],
}


@pytest.mark.parametrize(
    ("name", "own", "attention", "num_ranks", "message"),
    [
        ("LlamaConfig", {}, "sdpa", 3, "does not divide the 4 attention heads.*2 or 4"),
        ("Lfm2Config", {"layer_types": ["conv", "full_attention"]}, "sdpa", 2, "not run packed"),
        ("BloomConfig", {}, "eager", 2, "not run packed"),
        ("MambaConfig", {"state_size": 8}, "eager", 2, "not run packed"),
        ("Qwen3NextConfig", {"num_experts": 4, **EXPERTS}, "sdpa", 2, "not run packed"),
        ("Phi3Config", {"rope_parameters": LONGROPE}, "sdpa", 2, "part of a row.* is off by"),
    ],
)
def test_a_model_whose_rows_cannot_be_shared_is_refused(
    name: str, own: dict[str, Any], attention: str, num_ranks: int, message: str
) -> None:
    import transformers

    config = getattr(transformers, name)(**{**SIZES, **own})
    with pytest.raises(ConfigError, match=f"parallel.sp={num_ranks}.*{message}"):
        check_split(Support.of(config, attention), num_ranks)


def saved_by_ranks(folder: Path) -> tuple[str, list[dict[str, float]]]:
    """Return a checkpoint after an update, the hash of its weights, and the next update."""
    actor = small_actor(folder)
    actor.update_actor(make_batch(NUM_ROWS))
    actor.save_checkpoint(str(folder / "checkpoint"))
    return actor.weights_checksum(), [learned(actor.update_actor(make_batch(NUM_ROWS, seed=1)))]


def small_actor(folder: Path) -> ActorWorker:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = ParallelConfig(sp=world)
    return started(
        ActorWorker, tiny_config(folder, ppo_mini_batch_size=NUM_ROWS, parallel=parallel), 10
    )


def test_one_process_goes_on_from_a_checkpoint_of_ranks_that_shared_rows(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3")
    (weights, expected), _ = run_kept(2, saved_by_ranks, folder)
    actor = small_actor(folder)
    actor.load_checkpoint(str(folder / "checkpoint"))
    assert actor.weights_checksum() == weights
    found = learned(actor.update_actor(make_batch(NUM_ROWS, seed=1)))
    assert found == pytest.approx(expected[0], rel=1e-4, abs=1e-6)
