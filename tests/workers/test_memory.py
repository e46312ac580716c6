"""The predicted memory of a role, next to the bytes of its tensors."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.live_bytes import live_bytes, peak_bytes
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import tiny_config
from trainer.cli.make_tiny import make_tokenizer
from verl_like.batch.protocol import DataProto
from verl_like.batch.split import split_rows
from workers.config.rows import PreferenceWorkerConfig, RowDataConfig, TrainedModelConfig
from workers.memory import LargestPass, engine_memory
from workers.parallel import sharding
from workers.roles.actor import ActorWorker
from workers.roles.rows import PreferenceWorker
from workers.training import sharded_model
from workers.training.passes import attention, lm_head

PROMPT, RESPONSE, ROWS_AT_ONCE = 192, 320, 2
WIDTH = PROMPT + RESPONSE
NUM_ROWS = 2 * ROWS_AT_ONCE
"""Rows of a rank: an update has two passes, the second while gradients of the first are there."""
VOCABULARY = 4096
LORA = {"lora_rank": 8, "enable_gradient_checkpointing": True}
CASES: dict[str, dict[str, Any]] = {
    "LoRA actor, recomputed, head in chunks": {"model": LORA, "chunk_bytes": 2**22},
    "DPO": {"role": "dpo"},
    "actor, 2 ranks": {"num_ranks": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama with a few million weights."""
    folder = tmp_path_factory.mktemp("memory") / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def rows_of_ppo(num_rows: int) -> dict[str, torch.Tensor]:
    """Return rows without padding, with the columns that an actor reads."""
    ids = torch.randint(6, VOCABULARY, (num_rows, WIDTH))
    ones = torch.ones_like(ids)
    columns = {
        "input_ids": ids,
        "attention_mask": ones,
        "position_ids": ones.cumsum(1) - 1,
        "prompts": ids[:, :PROMPT].clone(),
        "responses": ids[:, PROMPT:].clone(),
        "response_mask": ones[:, PROMPT:].clone(),
    }
    numbers = dict.fromkeys(("advantages", "old_log_probs"), torch.randn(num_rows, RESPONSE))
    return columns | {name: column.clone() for name, column in numbers.items()}


def pairs(num_rows: int) -> dict[str, torch.Tensor]:
    """Return pairs of such rows, with every token except the first in the loss."""
    columns = rows_of_ppo(num_rows)
    named = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    named["responses"] = named["input_ids"][:, 1:].clone()
    named["response_mask"] = named["attention_mask"][:, 1:].clone()
    paired = {name: column.unflatten(0, (-1, 2)) for name, column in named.items()}
    count = num_rows // 2
    zeros = {"margin": torch.zeros(count), "ref_log_probs": torch.full((count, 2), -4000.0)}
    return paired | {name: column.double() for name, column in zeros.items()}


def actor(model: Path, num_ranks: int, settings: dict[str, Any]) -> tuple[Any, Any, list[str]]:
    """Return the worker of an actor, its configuration, and its calls."""
    config = tiny_config(
        model.parent,
        ppo_mini_batch_size=NUM_ROWS * num_ranks,
        ppo_micro_batch_size_per_gpu=ROWS_AT_ONCE,
    )
    policy = config.actor_rollout_ref
    for name, value in settings.items():
        setattr(policy.model, name, value)
    policy.rollout.log_prob_micro_batch_size_per_gpu = ROWS_AT_ONCE
    return ActorWorker, config, ["update_actor", "compute_log_prob"]


def dpo(model: Path) -> tuple[Any, Any, list[str]]:
    """Return the worker of DPO, its configuration, and its calls."""
    data = RowDataConfig(use_dynamic_bsz=False, micro_batch_size_per_gpu=ROWS_AT_ONCE // 2)
    config = PreferenceWorkerConfig(model=TrainedModelConfig(path=str(model)), data=data)
    return PreferenceWorker, config, ["update_model"]


def plain_attention(query: Any, key: Any, value: Any, _: Any, settings: Any) -> Any:
    """Compute attention of full rows, in their own dtype."""
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=settings.scale, enable_gqa=True
    )


def both_of_a_rank(model: Path, name: str) -> dict[str, tuple[float, int]]:
    """Return predicted and measured bytes, kept between calls and at the peak of the largest call.

    The role computes as on a GPU, because a CPU's own linear layers and float32 attention would use
    other memory.
    """
    case = CASES[name]
    num_ranks = case.get("num_ranks", 1)
    sharded_model.cpu_kernels = lambda _: nullcontext()
    attention._attention = plain_attention
    sharding.SMALL_ELEMENTS = 0  # ranks gather weights layer by layer, as in large models
    lm_head.CHUNK_BYTES = case.get("chunk_bytes", lm_head.CHUNK_BYTES)
    torch.manual_seed(0)
    is_dpo = case.get("role") == "dpo"
    kind, config, methods = dpo(model) if is_dpo else actor(model, num_ranks, case.get("model", {}))

    num_reads = WIDTH - 1 if is_dpo else RESPONSE
    largest = LargestPass(ROWS_AT_ONCE * WIDTH, ROWS_AT_ONCE * num_reads)
    predicted = engine_memory(kind.role_model(config, ""), "", "", num_ranks, "cpu", largest)

    worker = kind(config)

    def rows_here(num_rows: int) -> Any:
        rows = DataProto.from_dict((pairs if is_dpo else rows_of_ppo)(num_rows * num_ranks))
        return split_rows(rows, num_ranks)[worker.rank]

    few, many = rows_here(2), rows_here(NUM_ROWS)
    before = live_bytes()
    worker.init_model(10)
    for method in methods:  # the first update creates the moments
        getattr(worker, method)(few)
    peaks = [peak_bytes(partial(getattr(worker, method), many))[1] for method in methods]
    resident = live_bytes() - before
    return {"kept": (predicted.resident, resident), "call": (predicted.call, max(peaks))}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_role_takes_the_bytes_that_are_predicted(model: Path, name: str) -> None:
    for results in run_kept(CASES[name].get("num_ranks", 1), both_of_a_rank, model, name):
        for part, (predicted, measured) in results.items():
            assert measured > 2**22
            assert predicted == pytest.approx(measured, rel=0.1), part
