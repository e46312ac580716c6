"""Tables of numbers that the code computes: memory by stage, and token weights by aggregation."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from trainer.config.compose import load_config
from trainer.config.devices import run_devices
from trainer.memory import in_gib
from trainer.ppo.memory import role_memories
from trainer.ppo.recipe import PPO
from verl_like.terminal import draw_table
from workers.losses.aggregate import AGGREGATIONS, agg_loss
from workers.memory import pool_bytes

QWEN_7B = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
KEYS = """
trainer.simulate=8xH100 trainer.n_gpus_per_node=8 algorithm=grpo data.train_files=rows.parquet
data.max_prompt_length=512 data.max_response_length=512 data.train_batch_size=1024
actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=8
actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096 actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.model.enable_gradient_checkpointing=false
actor_rollout_ref.rollout.gpu_memory_utilization=0.6
"""
"""The example and the planned keys of `multi_gpu.md`."""
LENGTHS, WIDTH = (10, 1000), 1024


def memory_table() -> str:
    """GiB on each GPU in every stage of the example of `multi_gpu.md`."""
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(QWEN_7B), encoding="utf-8")
        config = load_config([*KEYS.split(), f"actor_rollout_ref.model.path={folder}"], PPO)
        devices = run_devices(config.trainer)
        roles = role_memories(config, devices.type, devices.bytes)
    actor, engine, ref = (
        next(memory for memory in roles if memory.role == role)
        for role in ("actor", "rollout", "ref")
    )
    table = {
        "actor's weights": [actor.weights] * 4,
        "optimizer state": [actor.moments] * 4,
        "reference's weights": [ref.weights] * 4,
        "gradients": [0, 0, actor.gradients, 0],
        "gathered weights": [0, ref.gathered, actor.gathered, engine.sync],
        "activations": [0, ref.activations or 0, actor.activations or 0, 0],
        "engine's weights": [engine.weights, 0, 0, engine.weights],
        "KV cache": [engine.kv_cache, 0, 0, 0],
    }
    sums = [sum(stage) for stage in zip(*table.values(), strict=True)]
    (planned,) = pool_bytes(roles).values()
    assert max(sums) == planned, f"the planner expects {in_gib(planned)} GiB"
    table["sum"] = sums
    lines: list[tuple[str, ...]] = [("GiB per GPU", "generate", "score", "update", "sync")]
    for name, numbers in table.items():
        lines.append((name, *(in_gib(number) if number else "" for number in numbers)))
    return text_table(lines)


def token_weights() -> str:
    """The weights of a token in a short and in a long response, by aggregation."""
    mask = torch.arange(WIDTH) < torch.tensor(LENGTHS)[:, None]
    lines = [("", *(f"token of {length:,}" for length in LENGTHS))]
    for mode in AGGREGATIONS:
        losses = torch.zeros(mask.shape, requires_grad=True)
        agg_loss(losses, mask, mode).backward()
        assert losses.grad is not None
        lines.append((mode, *(f"{weight:.2g}" for weight in losses.grad[:, 0].tolist())))
    return text_table(lines)


def text_table(lines: list[tuple[str, ...]]) -> str:
    """Draw lines of cells as a block of text, with numbers aligned right."""
    return "\n".join(["```text", *draw_table(lines, flush_right=True), "```"])
