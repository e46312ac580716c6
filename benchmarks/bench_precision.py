"""Compare bfloat16 with float32 passes over float32 weights, and show what bfloat16 weights lose.

    python benchmarks/bench_precision.py [--rounds 5] [--hidden 512] [--layers 4] [--rows 32]

Two actors in one process are updated alternately on the same rows; one computes in float32, the
other in bfloat16. The ratio of their CPU times is the median over rounds. It should be at least 1.5
if the processor has bfloat16 products (avx512_bf16 or amx_bf16 in /proc/cpuinfo). Otherwise
bfloat16 is slower, and `so` says so. Then the same model is trained for five steps of AdamW at lr
1e-6 with float32 and with bfloat16 weights, and the fraction of weights that changed is reported.
Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from tensordict import TensorDict

from verl_like import DataProto
from workers.config import (
    ActorRolloutRefConfig,
    CriticConfig,
    ModelConfig,
    OptimConfig,
    RolloutConfig,
    RolloutCorrectionConfig,
    WorkersConfig,
)
from workers.roles.actor import ActorWorker

PROMPT, RESPONSE, VOCAB = 32, 96, 4096
CPU_INFO = Path("/proc/cpuinfo")
GOAL = 1.5
"""Minimum speedup of an update in bfloat16 over float32."""


def make_model(folder: Path, hidden: int, layers: int) -> None:
    """Write a Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 128),
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def make_rows(count: int) -> DataProto:
    """Return full rows of random tokens with random advantages."""
    generator = torch.Generator().manual_seed(0)
    width = PROMPT + RESPONSE
    ids = torch.randint(3, VOCAB, (count, width), generator=generator)
    ones = torch.ones_like(ids)
    columns = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": torch.arange(width).expand(count, width).clone(),
        "responses": ids[:, PROMPT:].clone(),
        "response_mask": ones[:, PROMPT:].clone(),
        "advantages": torch.randn(count, RESPONSE, generator=generator),
        "old_log_probs": torch.full((count, RESPONSE), -8.3),
    }
    return DataProto(batch=TensorDict(columns, batch_size=[count]))


def make_actor(folder: Path, rows: int, **model: Any) -> ActorWorker:
    """Return an actor whose update is one mini-batch of these rows at lr 1e-6."""
    policy = ActorRolloutRefConfig(
        model=ModelConfig(path=str(folder), **model), rollout=RolloutConfig(n=1)
    )
    policy.actor.optim = OptimConfig(lr=1e-6)
    policy.actor.use_dynamic_bsz = False
    policy.actor.ppo_mini_batch_size, policy.actor.ppo_micro_batch_size_per_gpu = rows, 8
    config = WorkersConfig(
        actor_rollout_ref=policy,
        critic=CriticConfig(),
        data=SimpleNamespace(max_prompt_length=PROMPT, max_response_length=RESPONSE),
        trainer=SimpleNamespace(seed=0),
        algorithm=SimpleNamespace(rollout_correction=RolloutCorrectionConfig()),
    )
    actor = ActorWorker(config)
    actor.init_model(100)
    return actor


def seconds_of(actor: ActorWorker, rows: DataProto) -> float:
    """Return the CPU time of one update, on one thread."""
    began = time.process_time()
    actor.update_actor(rows)
    return time.process_time() - began


def bfloat16_products() -> list[str]:
    """Return the processor's instructions for bfloat16 products."""
    text = CPU_INFO.read_text(encoding="utf-8") if CPU_INFO.is_file() else ""
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return [name for name in ("avx512_bf16", "amx_bf16") if name in flags]


def verdict(ratio: float, products: list[str]) -> str:
    """Return what the ratio means for this processor."""
    if not products:
        return f"this processor has no bfloat16 products: {ratio:.2f} is not what others would give"
    reached = "reached" if ratio >= GOAL else "not reached"
    return f"{ratio:.2f} with {', '.join(products)}: the goal of {GOAL} is {reached}"


def share_after_five_steps(actor: ActorWorker, rows: DataProto) -> float:
    """Return the fraction of weights that changed in five steps."""
    before = [weight.detach().clone() for weight in actor.engine.parameters()]
    for _ in range(5):
        actor.update_actor(rows)
    pairs = zip(before, actor.engine.parameters(), strict=True)
    moved = sum(int((old != new).sum()) for old, new in pairs)
    return moved / sum(weight.numel() for weight in before)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser()
    for name, default in (("rounds", 5), ("hidden", 512), ("layers", 4), ("rows", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)

    with tempfile.TemporaryDirectory() as place:
        folder, rows = Path(place), make_rows(args.rows)
        make_model(folder, args.hidden, args.layers)
        actors = {
            dtype: make_actor(folder, args.rows, compute_dtype=dtype)
            for dtype in ("float32", "bfloat16")
        }

        times: dict[str, list[float]] = {dtype: [] for dtype in actors}
        for round_ in range(-1, args.rounds):
            for dtype, actor in actors.items():
                spent = seconds_of(actor, rows)
                if round_ >= 0:  # the first update builds kernels
                    times[dtype].append(spent)

        ratios = [a / b for a, b in zip(times["float32"], times["bfloat16"], strict=True)]
        weights = {
            dtype: share_after_five_steps(make_actor(folder, args.rows, dtype=dtype), rows)
            for dtype in ("float32", "bfloat16")
        }

    print(
        json.dumps(
            {
                "float32_s": statistics.median(times["float32"]),
                "bfloat16_s": statistics.median(times["bfloat16"]),
                "float32 over bfloat16": statistics.median(ratios),
                "so": verdict(statistics.median(ratios), bfloat16_products()),
                "moved, float32 weights": weights["float32"],
                "moved, bfloat16 weights": weights["bfloat16"],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
