"""GRPO from scratch: one step of the dataflow in plain code, without a configuration file.

    verl-like make-tiny tiny && python examples/grpo_from_scratch.py tiny/model local

Two roles share a pool of processes: the rollout samples, and the actor trains. `verl-like ppo` runs
the same calls on the same samples, with checkpoints, logs and checks around them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoTokenizer

from verl_like import (
    ClassWithInitArgs,
    DataProto,
    LocalWorkerGroup,
    PPOConfig,
    RaggedTensor,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl_like.extend import (
    ActorWorker,
    RolloutWorker,
    compute_grpo_outcome_advantage,
    decode_responses,
    place_at_last_token,
    repeat_prompts,
    replace_keys,
    sync_weights,
    write_columns,
)

NUM_SAMPLES, NUM_STEPS, PROMPT_TOKENS, RESPONSE_TOKENS = 4, 5, 16, 8


def reward(response: str) -> float:
    """Return the fraction of characters that are digits."""
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def batch_of(texts: Sequence[str], tokenizer: Any, step: int) -> DataProto:
    """Tokenize prompts; uid and index of a sample choose its random numbers."""
    rows = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
    ids = RaggedTensor.from_rows(rows, PROMPT_TOKENS, at_end=True, fill=tokenizer.pad_token_id)
    positions = ids.with_values(torch.cat([torch.arange(len(row)) for row in rows]))
    mask = ids.with_values(torch.ones_like(ids.values))
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": mask, "position_ids": positions},
        {"uid": [f"{row}-{step}" for row in range(len(texts))]},
        {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
    )


def train(model: str, backend: str = "local", texts: Sequence[str] = ()) -> list[dict[str, float]]:
    """Train for `NUM_STEPS` steps, and return the metrics of each."""
    texts = texts or [f"{number} plus 2" for number in range(8)]
    tokenizer = AutoTokenizer.from_pretrained(model)
    settings = {
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.rollout.name": "native",
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": RESPONSE_TOKENS,
    }
    config = replace_keys(PPOConfig(), settings)
    workers = {"actor": ActorWorker, "rollout": RolloutWorker}
    roles = {role: ClassWithInitArgs(worker, config) for role, worker in workers.items()}
    group = RayWorkerGroup if backend == "ray" else LocalWorkerGroup
    metrics = []
    with RayResourcePool([1]) as pool, group(pool, create_colocated_worker_cls(roles)) as both:
        actor, rollout = both.spawn(["actor", "rollout"]).values()
        actor.init_model(NUM_STEPS)
        rollout.init_model()
        for step in range(NUM_STEPS):
            sync_weights(actor, rollout, version=step + 1)
            prompts = repeat_prompts(batch_of(texts, tokenizer, step), NUM_SAMPLES)
            batch = rollout.generate_sequences(prompts)
            scores = torch.tensor(list(map(reward, decode_responses(batch, tokenizer))))
            mask = batch.padded("response_mask")
            advantages, _ = compute_grpo_outcome_advantage(
                place_at_last_token(scores, mask), mask, prompts.non_tensor_batch["uid"]
            )
            outputs = actor.forward(batch, ("log_probs",)).rename("log_probs", "old_log_probs")
            batch = write_columns(batch, advantages=advantages).union(outputs)
            actor.forward_backward(batch, "policy")
            (step_metrics,) = actor.optim_step()
            metrics.append({"reward": scores.mean().item(), **step_metrics})
    return metrics


if __name__ == "__main__":
    for line in train(*sys.argv[1:]):
        print(line)
