"""Show what bfloat16 weights lose: how many weights five steps of AdamW change.

    python benchmarks/bench_precision.py

The same Llama with random weights is trained for five steps at lr 1e-6 on the same rows, with
float32 and with bfloat16 weights. Prints JSON with the fraction of weights that changed.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from sides import actor_worker, full_rows, make_llama

from verl_like import DataProto
from workers.config import ActorRolloutRefConfig, ModelConfig, OptimConfig, RolloutConfig

NUM_ROWS, PROMPT, RESPONSE, VOCAB, LOG_PROB = 8, 32, 96, 4096, -8.3


def share_after_five_steps(folder: Path, rows: DataProto, dtype: Any) -> float:
    """Return the fraction of weights that changed in five steps."""
    model = ModelConfig(path=str(folder), dtype=dtype)
    policy = ActorRolloutRefConfig(model=model, rollout=RolloutConfig(n=1))
    policy.actor.optim = OptimConfig(lr=1e-6)
    policy.actor.use_dynamic_bsz = False
    policy.actor.ppo_mini_batch_size = policy.actor.ppo_micro_batch_size_per_gpu = NUM_ROWS
    actor = actor_worker(policy, "cpu", PROMPT, RESPONSE)
    actor.init_model(100)
    before = [weight.detach().clone() for weight in actor.engine.parameters()]
    for _ in range(5):
        actor.update_actor(rows)
    pairs = zip(before, actor.engine.parameters(), strict=True)
    moved = sum(int((old != new).sum()) for old, new in pairs)
    return moved / sum(weight.numel() for weight in before)


def main() -> None:
    """Measure, and print the results."""
    torch.set_num_threads(1)
    drawn = ("old_log_probs", "advantages")
    columns = full_rows(NUM_ROWS, PROMPT, RESPONSE, range(3, VOCAB), drawn, LOG_PROB)
    rows, shares = DataProto.from_dict(columns), {}
    with tempfile.TemporaryDirectory() as name:
        sizes = {"vocab_size": VOCAB, "intermediate_size": 352}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        make_llama(Path(name), 128, 2, **sizes, **heads)
        for dtype in ("float32", "bfloat16"):
            shares[f"moved, {dtype} weights"] = share_after_five_steps(Path(name), rows, dtype)
    print(json.dumps(shares, indent=1))


if __name__ == "__main__":
    main()
