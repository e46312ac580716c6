"""Bytes of a role's tensors, measured and predicted.

    python benchmarks/memory_side.py FOLDER CASE

With torchrun's environment variables, it is one of several ranks. The worker is the role's own,
rows have full length, and an update has two passes, because the second one runs while gradients of
the first are in memory. Prints JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from live_bytes import live_bytes, peak_bytes
from sides import full_rows

PROMPT, RESPONSE, ROWS_AT_ONCE, PASSES = 192, 320, 4, 2
WIDTH = PROMPT + RESPONSE
DRAWN = ("advantages", "values", "returns", "old_log_probs", "ref_log_prob")
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "vocab_size": 4096,
}

NONE: Mapping[str, Any] = MappingProxyType({})


class Case(NamedTuple):
    """A role, the settings of its model, and the number of ranks."""

    role: str
    model: Mapping[str, Any] = NONE
    num_ranks: int = 1
    strategy: str = "fsdp"
    parallel: Mapping[str, int] = NONE
    by_layer: bool = True
    """True if ranks gather weights layer by layer, as in large models."""
    chunk_bytes: int | None = None
    """Bytes of logits at a time, which makes the head run in chunks."""


AGAIN = {"enable_gradient_checkpointing": True}
NARROW = {"compute_dtype": "bfloat16"}
LORA = {"lora_rank": 8}
CHUNK = 2**22
CASES = {
    "PPO actor": Case("actor"),
    "PPO critic": Case("critic"),
    "PPO reference": Case("ref"),
    "PPO reward model": Case("reward_model"),
    "GRPO actor": Case("grpo"),
    "SFT": Case("sft"),
    "DPO": Case("dpo"),
    "LoRA actor": Case("actor", LORA),
    "actor, recomputed": Case("actor", AGAIN),
    "critic, recomputed": Case("critic", AGAIN),
    "SFT, recomputed": Case("sft", AGAIN),
    "LoRA actor, recomputed": Case("actor", {**LORA, **AGAIN}),
    "actor, head in chunks": Case("actor", chunk_bytes=CHUNK),
    "reference, head in chunks": Case("ref", chunk_bytes=CHUNK),
    "actor, recomputed, head in chunks": Case("actor", AGAIN, chunk_bytes=CHUNK),
    "LoRA actor, recomputed, head in chunks": Case("actor", {**LORA, **AGAIN}, chunk_bytes=CHUNK),
    "actor in bfloat16": Case("actor", NARROW),
    "actor in bfloat16, recomputed": Case("actor", {**NARROW, **AGAIN}),
    "actor in bfloat16, head in chunks": Case("actor", NARROW, chunk_bytes=CHUNK),
    "actor, 2 ranks": Case("actor", num_ranks=2),
    "actor, 4 ranks": Case("actor", num_ranks=4),
    "actor, recomputed, 2 ranks": Case("actor", AGAIN, 2),
    "critic, 2 ranks": Case("critic", num_ranks=2),
    "reference, 2 ranks": Case("ref", num_ranks=2),
    "SFT, 2 ranks": Case("sft", num_ranks=2),
    "DPO, 4 ranks": Case("dpo", num_ranks=4),
    "LoRA actor, 2 ranks": Case("actor", LORA, 2),
    "actor in bfloat16, 2 ranks": Case("actor", NARROW, 2),
    "actor, 2 ranks, one unit": Case("actor", num_ranks=2, by_layer=False),
    "actor, 2 ranks, shard_grad_op": Case("actor", num_ranks=2, strategy="shard_grad_op"),
    "actor, 2 ranks, ddp": Case("actor", num_ranks=2, strategy="ddp"),
    "actor, tp of 2": Case("actor", num_ranks=2, parallel={"tp": 2}),
}


def make_models(folder: Path) -> None:
    """Write a Llama with a few million weights and a classifier based on it, with tokenizers."""
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    from trainer.cli.make_tiny import make_tokenizer

    torch.manual_seed(0)
    kinds: dict[str, Any] = {"model": LlamaForCausalLM, "scorer": LlamaForSequenceClassification}
    for name, kind in kinds.items():
        labels = {"num_labels": 1} if name == "scorer" else {}
        kind(LlamaConfig(**SIZES, **labels, pad_token_id=0)).save_pretrained(folder / name)
        make_tokenizer().save_pretrained(folder / name)


def rows_of_ppo(num_rows: int) -> dict[str, torch.Tensor]:
    """Return rows without padding, with every column that calls of PPO's roles read."""
    words = range(6, SIZES["vocab_size"])
    return full_rows(num_rows, PROMPT, RESPONSE, words, DRAWN, -8.3)


def texts(num_rows: int) -> dict[str, torch.Tensor]:
    """Return the same rows, with every token except the first in the loss."""
    columns = rows_of_ppo(num_rows)
    named = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    return {
        **named,
        "responses": named["input_ids"][:, 1:].clone(),
        "response_mask": named["attention_mask"][:, 1:].clone(),
    }


def pairs(num_rows: int) -> dict[str, torch.Tensor]:
    """Return texts in pairs."""
    columns = {name: c.unflatten(0, (-1, 2)) for name, c in texts(num_rows).items()}
    count = len(columns["input_ids"])
    zeros = {"margin": torch.zeros(count), "ref_log_probs": torch.full((count, 2), -4000.0)}
    return columns | {name: column.double() for name, column in zeros.items()}


ROWS = {"sft": texts, "dpo": pairs}
"""Columns of roles that read other columns than PPO's."""
PARTS = ("weights", "moments", "gradients", "gathered", "activations")
Methods = list[str]


def ppo_worker(folder: Path, case: Case) -> tuple[Any, Any, Methods]:
    """Return the worker of a PPO role, its configuration, and its calls."""
    from tests.workers.samples import tiny_config
    from workers.config import ParallelConfig, RewardModelConfig
    from workers.roles.actor import ActorWorker
    from workers.roles.critic import CriticWorker
    from workers.roles.reference import ReferenceWorker
    from workers.roles.reward_model import RewardModelWorker

    kinds: dict[str, tuple[Any, Methods]] = {
        "actor": (ActorWorker, ["update_actor", "compute_log_prob"]),
        "grpo": (ActorWorker, ["update_actor", "compute_log_prob"]),
        "critic": (CriticWorker, ["update_critic", "compute_values"]),
        "ref": (ReferenceWorker, ["compute_ref_log_prob"]),
        "reward_model": (RewardModelWorker, ["compute_rm_score"]),
    }
    num_rows = ROWS_AT_ONCE * PASSES * case.num_ranks
    config = tiny_config(
        folder,
        ppo_mini_batch_size=num_rows,
        ppo_micro_batch_size_per_gpu=ROWS_AT_ONCE,
        parallel=ParallelConfig(**case.parallel),
        strategy=case.strategy,
    )
    policy, critic = config.actor_rollout_ref, config.critic
    if case.role == "grpo":
        policy.rollout.n, policy.actor.use_kl_loss = ROWS_AT_ONCE, True
        policy.actor.ppo_mini_batch_size = num_rows // ROWS_AT_ONCE
    for model in (policy.model, critic.model):
        for name, value in case.model.items():
            setattr(model, name, value)
    for section in (policy.rollout, policy.ref):
        section.log_prob_micro_batch_size_per_gpu = ROWS_AT_ONCE
    critic.ppo_micro_batch_size_per_gpu = ROWS_AT_ONCE
    config.reward.model = RewardModelConfig(
        enable=True, path=str(folder / "scorer"), micro_batch_size_per_gpu=ROWS_AT_ONCE
    )
    kind, calls = kinds[case.role]
    return kind, config, calls


def row_worker(folder: Path, case: Case) -> tuple[Any, Any, Methods]:
    """Return the worker of a recipe on rows, its configuration, and its calls."""
    import workers.losses.preference  # noqa: F401
    from workers.config import ParallelConfig
    from workers.config.rows import (
        PreferenceWorkerConfig,
        RowDataConfig,
        RowWorkerConfig,
        TrainedModelConfig,
    )
    from workers.roles.preference import PreferenceWorker
    from workers.roles.rows import SFTWorker

    is_pair = case.role == "dpo"
    data = RowDataConfig(
        use_dynamic_bsz=False, micro_batch_size_per_gpu=ROWS_AT_ONCE // (1 + is_pair)
    )
    path = str(folder / "model")
    settings: Any = {
        "model": TrainedModelConfig(path=path, strategy=case.strategy, **case.model),
        "data": data,
        "parallel": ParallelConfig(**case.parallel),
    }
    if is_pair:
        return PreferenceWorker, PreferenceWorkerConfig(**settings), ["update_model"]
    return SFTWorker, RowWorkerConfig(**settings), ["update_model", "compute_log_prob"]


def plain_attention(query: Any, key: Any, value: Any, _: Any, settings: Any) -> Any:
    """Compute attention of full rows, in their own dtype."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=settings.scale, enable_gqa=True
    )


def set_up(folder: str, case: Case) -> tuple[Any, Any, Methods]:
    """Return the worker class of a role, its configuration, and its calls, for this case.

    It computes as on a GPU, because a CPU's own linear layers and float32 attention would use other
    memory.
    """
    from workers.parallel import sharding
    from workers.training import attention, lm_head
    from workers.training import sharded_model as model_module

    model_module.cpu_kernels = lambda _: nullcontext()
    attention._attention = plain_attention
    sharding.SMALL_ELEMENTS = 0 if case.by_layer else sharding.SMALL_ELEMENTS
    lm_head.CHUNK_BYTES = case.chunk_bytes or lm_head.CHUNK_BYTES
    make = row_worker if case.role in ROWS else ppo_worker
    return make(Path(folder), case)


def predicted(folder: str, case: Case) -> Any:
    """Return the predicted `RoleMemory` of a rank."""
    from workers.memory import LargestPass, memory_of

    kind, config, _ = set_up(folder, case)
    num_reads = {"reward_model": 1, "sft": WIDTH - 1, "dpo": WIDTH - 1}.get(case.role, RESPONSE)
    largest = LargestPass(ROWS_AT_ONCE * WIDTH, ROWS_AT_ONCE * num_reads)
    role = "reward_model" if case.role == "reward_model" else ""
    role_model = kind.role_model(config, role)
    return memory_of(role_model, "", "", case.num_ranks, "cpu", largest)


def measured(folder: str, case: Case) -> dict[str, int]:
    """Return the bytes that this rank keeps between calls, and each call's peak in addition."""
    from verl_like.batch.protocol import DataProto
    from verl_like.batch.split import split_rows

    torch.set_num_threads(1)
    kind, config, methods = set_up(folder, case)
    worker = kind(config)
    tp = case.parallel.get("tp", 1)
    data_ranks = case.num_ranks // tp
    make = ROWS.get(case.role, rows_of_ppo)

    def rows_here(num_rows: int) -> Any:
        rows = DataProto.from_dict(make(num_rows * data_ranks))
        return split_rows(rows, data_ranks)[worker.rank // tp]

    few, many = rows_here(2), rows_here(ROWS_AT_ONCE * PASSES)
    init = () if case.role == "ref" else (10,)
    before = live_bytes()
    worker.init_model(*init)
    for method in methods:  # the first update creates the moments
        getattr(worker, method)(few)
    calls = {method: peak_bytes(partial(getattr(worker, method), many))[1] for method in methods}
    return {"kept": live_bytes() - before, **calls}


def compared(folder: str, case: Case) -> dict[str, Any]:
    """Return both for the bytes kept and for the largest call, with the parts of the prediction."""
    memory, results = predicted(folder, case), measured(folder, case)
    kept_bytes = results.pop("kept")
    return {
        "kept": {"predicted": memory.resident, "measured": kept_bytes},
        "call": {"predicted": memory.call, "measured": max(results.values())},
        "calls": results,
        "parts": {name: getattr(memory, name) for name in PARTS},
    }


def main(folder: str, case: str) -> None:
    """Print the results of this rank."""
    from verl_like.process.info import OWN_PROCESS

    os.environ[OWN_PROCESS] = "1"
    print(json.dumps(compared(folder, CASES[case])))


if __name__ == "__main__":
    main(*sys.argv[1:3])
