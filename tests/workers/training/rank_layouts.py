"""Small models of every family, and whole updates of them on ranks that share a model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import (
    VOCAB,
    learned,
    make_batch,
    own_chunk,
    started,
    tiny_config,
    weights_of,
)
from workers.config import OptimConfig, ParallelConfig
from workers.models.state import local_shard, named_state
from workers.parallel import sharding
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.mfu import needed_flops
from workers.training.microbatch import MicroBatchBudget
from workers.training.passes import lm_head
from workers.weights.full_weights import checksum_of

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
    "qwen2-moe": (
        "Qwen2MoeConfig",
        {
            **EXPERTS,
            "num_experts": 4,
            "intermediate_size": 48,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "deepseek-v3": ("DeepseekV3Config", {**EXPERTS, **LATENT}),
    "gpt-oss": ("GptOssConfig", {"num_local_experts": 4, **EXPERTS, **WINDOW}),
    "outnumbered heads": (
        "LlamaConfig",
        {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32},
    ),
}
WITH_ROUTER_LOSS = ("mixtral", "qwen3-moe")
AXES = ("pp", "pp_schedule", "sp", "tp", "ep", "shard")


def saved(folder: Path, family: str, **more: Any) -> Path:
    """The folder of a small model, whose state is off its defaults, including router buffers."""
    import transformers

    name, own = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **own, **more})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for _, weight in named_state(model):
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(folder / "model")
    return folder


def trained(
    folder: Path, family: str, change: dict[str, Any], num_rows: int = NUM_ROWS
) -> dict[str, Any]:
    """Return log-probs, gradients and two updates of actor and critic on this rank's rows.

    `change` has axes, which one process leaves out, a micro-batch, a strategy, and settings of the
    model.
    """
    change, is_alone = dict(change), os.environ.get("WORLD_SIZE", "1") == "1"
    axes = {name: change.pop(name) for name in AXES if name in change}
    rows, tokens, chunk, one_unit = (
        change.pop(name, None) for name in ("rows", "tokens", "chunk", "one_unit")
    )
    config = tiny_config(folder, ppo_mini_batch_size=NUM_ROWS, entropy_coeff=0.01)
    section = config.actor_rollout_ref.actor
    section.optim, config.critic.optim = OptimConfig(lr=1e-4, eps=1e-4), {"lr": 1e-4}
    section.use_dynamic_bsz = rows is None
    section.ppo_micro_batch_size_per_gpu = rows
    section.ppo_max_token_len_per_gpu = tokens or section.ppo_max_token_len_per_gpu
    is_heard = axes.get("pp_schedule") != "interleaved" and "lora_rank" not in change
    if family in WITH_ROUTER_LOSS and is_heard:
        section.router_aux_loss_coef = 0.5
    strategy = change.pop("strategy", "fsdp")
    lm_head.CHUNK_BYTES = chunk or lm_head.CHUNK_BYTES
    if not is_alone:
        sharding.SMALL_ELEMENTS = sharding.SMALL_ELEMENTS if one_unit is None else one_unit
        section.strategy = config.critic.strategy = strategy
        config.parallel = ParallelConfig(**axes)
    for name, value in change.items():
        setattr(config.actor_rollout_ref.model, name, value)
        setattr(config.critic.model, name, value)

    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    dims = actor.engine.dims
    data = own_chunk(make_batch(num_rows), dims.data_rank(actor.rank), dims.data_size)
    start, real = data.shard.start if data.shard else 0, data.num_real_rows
    budget = MicroBatchBudget(rows=rows) if rows else MicroBatchBudget(tokens=tokens)
    experts = [w for name, w in actor.engine.module.named_parameters() if ".experts." in name]
    return {
        "loaded": actor.weights_checksum(),
        "sent": checksum_of(actor.engine.named_full_tensors(on_all_ranks=False)),
        "held": sum(local_shard(weight).numel() for weight in experts),
        "rows": slice(start, start + real),
        "log_probs": actor.compute_log_prob(data)[0].batch["old_log_probs"][:real],
        "flops": needed_flops(actor.engine, trains=False),
        "gradients": gradients(actor, data, ACTOR_COLUMNS, budget),
        "critic_gradients": gradients(critic, data, ("values", "returns"), budget),
        "metrics": [learned(actor.update_actor(data)) for _ in range(2)],
        "critic_metrics": [learned(critic.update_critic(data)) for _ in range(2)],
        "weights": weights_of(actor),
        "critic_weights": weights_of(critic),
    }


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Return the relative distance of all tensors together."""
    assert found.keys() == expected.keys()
    ours = torch.cat([found[name].flatten() for name in expected])
    theirs = torch.cat([tensor.flatten() for tensor in expected.values()])
    return float((ours - theirs).norm() / theirs.norm())
