"""Whole updates with tensor parallelism over several ranks, against one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.tensor import DTensor

from tests.workers import distributed
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import (
    VOCAB,
    make_batch,
    own_chunk,
    started,
    tiny_config,
)
from tests.workers.training.test_sequence_ranks import (
    FAMILIES,
    NUM_ROWS,
    WITH_ROUTER_LOSS,
    distance,
    saved,
)
from tests.workers.training.three_updates import chunk_of, three_updates
from workers.config import OptimConfig, ParallelConfig
from workers.models.state import local_shard
from workers.parallel import sharding
from workers.parallel.fsdp import full_tensor
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training import lm_head
from workers.training.checkpoint import averages, optimizer_state, weights
from workers.training.mfu import needed_flops
from workers.training.microbatch import MicroBatchBudget

CUT = [family for family in FAMILIES if family not in ("gpt-oss", "outnumbered heads")]
CUT.remove("qwen2, one head of keys")
CHANGES: dict[str, dict[str, Any]] = {
    "three micro-batches": {"rows": 3},
    "one micro-batch": {"rows": NUM_ROWS},
    "checkpointing": {"rows": 3, "enable_gradient_checkpointing": True},
    "head in chunks": {"rows": 3, "chunk": 4 * 5 * VOCAB // 2},
    "whole weights": {"rows": 3, "strategy": "ddp"},
    "lora": {"rows": 3, "lora_rank": 4, "target_modules": "all-linear"},
    "lora at once": {"rows": NUM_ROWS, "lora_rank": 4, "target_modules": "all-linear"},
}
QUICK = [("gemma-2", "three micro-batches"), ("qwen3-moe", "three micro-batches")]
QUICK += [("deepseek-v3", "checkpointing"), ("qwen3", "lora"), ("phi-3", "head in chunks")]
QUICK_FOUR = [("qwen3", "shards, too")]
FOUR: dict[str, dict[str, Any]] = {
    "shards, too": {"rows": 2},
    "copies, too": {"rows": 2, "fsdp_size": 1},
    "layers apart": {"rows": 2, "one_unit": 0},
    "gathered once": {"rows": 2, "one_unit": 0, "strategy": "shard_grad_op"},
    "whole weights": {"rows": 2, "strategy": "ddp"},
    "sequences, too": {"rows": 2, "sp": 2},
    "lora": {"rows": 2, "lora_rank": 4, "target_modules": "all-linear"},
}


def trained(folder: Path, family: str, change: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs, gradients and three updates of actor and critic."""
    change, world = dict(change), int(os.environ.get("WORLD_SIZE", "1"))
    rows, chunk, one_unit = (change.pop(name, None) for name in ("rows", "chunk", "one_unit"))
    if world > 1:
        lm_head.CHUNK_BYTES = chunk or lm_head.CHUNK_BYTES
        sharding.SMALL_ELEMENTS = sharding.SMALL_ELEMENTS if one_unit is None else one_unit
    config = tiny_config(folder, ppo_mini_batch_size=NUM_ROWS, entropy_coeff=0.01)
    actor_section = config.actor_rollout_ref.actor
    actor_section.optim, config.critic.optim = OptimConfig(lr=1e-4, eps=1e-4), {"lr": 1e-4}
    actor_section.ppo_micro_batch_size_per_gpu = rows
    if family in WITH_ROUTER_LOSS and "lora_rank" not in change:
        actor_section.router_aux_loss_coef = 0.5
    actor_section.strategy = change.pop("strategy", "fsdp")
    fsdp_size, sp = change.pop("fsdp_size", -1), change.pop("sp", 1)
    if world > 1:
        actor_section.fsdp_config = {"fsdp_size": fsdp_size}
        config.critic.strategy = actor_section.strategy
        config.critic.model.fsdp_config = actor_section.fsdp_config
        config.parallel = ParallelConfig(tp=2, sp=sp)
    for name, value in change.items():
        setattr(config.actor_rollout_ref.model, name, value)
        setattr(config.critic.model, name, value)

    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    data = chunk_of(actor, NUM_ROWS)
    return {
        "flops": needed_flops(actor.engine, data, trains=True),
        "loaded": actor.weights_checksum(),
        **three_updates(actor, critic, data, MicroBatchBudget(rows=rows)),
    }


def assert_trains_as_one(folder: Path, family: str, num_ranks: int, how: dict[str, Any]) -> None:
    saved(folder, family)
    alone = trained(folder, family, how)
    # torch keeps meshes of equal looks, whose groups end with a test of a kept process
    run = run_kept if num_ranks == 2 else distributed.run
    for result in run(num_ranks, trained, folder, family, how, deadline_s=150):
        assert result["loaded"] == alone["loaded"]
        if num_ranks == 2:
            assert result["flops"] == alone["flops"]
        expected = alone["log_probs"][result["rows"]]
        torch.testing.assert_close(result["log_probs"], expected, atol=1e-6, rtol=0)
        for role in ("", "critic_"):
            assert distance(result[f"{role}gradients"], alone[f"{role}gradients"]) < 2e-6
            assert distance(result[f"{role}weights"], alone[f"{role}weights"]) < 1e-6
            for ours, theirs in zip(result[f"{role}metrics"], alone[f"{role}metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


def cells(changes: dict[str, dict[str, Any]], quick: list[tuple[str, str]]) -> list[Any]:
    found = []
    for family in CUT:
        for change in changes:
            marks = [] if (family, change) in quick else [pytest.mark.slow]
            found.append(pytest.param(family, change, marks=marks))
    return found


@pytest.mark.parametrize(("family", "change"), cells(CHANGES, QUICK))
def test_ranks_that_share_matrices_train_as_one(tmp_path: Path, family: str, change: str) -> None:
    assert_trains_as_one(tmp_path, family, 2, CHANGES[change])


@pytest.mark.parametrize(("family", "change"), cells(FOUR, QUICK_FOUR))
def test_four_ranks_share_rows_and_matrices(tmp_path: Path, family: str, change: str) -> None:
    assert_trains_as_one(tmp_path, family, 4, FOUR[change])


State = dict[str, torch.Tensor]


def actor_over(folder: Path, parallel: ParallelConfig, lora_rank: int = 0) -> ActorWorker:
    """Return an actor with a moving average, whose checkpoints have an export."""
    config = tiny_config(folder, ppo_mini_batch_size=NUM_ROWS, parallel=parallel, ema_decay=0.5)
    config.actor_rollout_ref.model.lora_rank = lora_rank
    config.actor_rollout_ref.actor.checkpoint.save_contents.append("hf_model")
    actor: ActorWorker = started(ActorWorker, config, 10)
    return actor


def state_of(actor: ActorWorker) -> State:
    """Return all tensors of a checkpoint, whole."""
    kept = weights(actor.engine) | optimizer_state(actor.engine) | averages(actor.average)
    return {name: full_tensor(tensor).clone() for name, tensor in kept.items()}


def updated_and_saved(folder: Path, parallel: ParallelConfig, lora_rank: int) -> tuple[State, str]:
    """Return the state after an update, saved as "first", and the hash of the weights.

    Ranks that hold the same part of a weight have the same bits of it.
    """
    actor = actor_over(folder, parallel, lora_rank)
    data = make_batch(NUM_ROWS)
    dims = actor.engine.dims
    actor.update_actor(own_chunk(data, dims.data_rank(actor.rank), dims.data_size))
    actor.save_checkpoint(str(folder / "first"))
    for weight in actor.engine.parameters():
        if isinstance(weight, DTensor) and weight.placements[-1].is_replicate():
            own, group = local_shard(weight), actor.engine.groups.tp
            of_ranks = [torch.empty_like(own) for _ in range(dims.tp)]
            torch.distributed.all_gather(of_ranks, own, group=group)
            assert all(other.equal(own) for other in of_ranks)
    return state_of(actor), actor.weights_checksum()


def resumed(
    folder: Path, parallel: ParallelConfig, lora_rank: int, name: str, into: str
) -> tuple[State, str]:
    """Return the same of an actor that resumed, saved under another name."""
    actor = actor_over(folder, parallel, lora_rank)
    actor.load_checkpoint(str(folder / name))
    actor.save_checkpoint(str(folder / into))
    return state_of(actor), actor.weights_checksum()


TP, SHARDS, ONE = ParallelConfig(tp=2), ParallelConfig(), ParallelConfig()


def assert_resumes(folder: Path, family: str, first: int, last: int, lora_rank: int = 0) -> None:
    """Resume from tensor-parallel ranks on sharded ranks, on one rank, and back."""
    saved(folder, family)
    results = run_kept(first, updated_and_saved, folder, TP, lora_rank)
    (expected, checksum), *others = results
    assert len(expected) > 3 * len([name for name in expected if name.startswith("model.")])
    found = others
    found += run_kept(2, resumed, folder, SHARDS, lora_rank, "first", "second")
    found += [resumed(folder, ONE, lora_rank, "second", "third")]
    found += run_kept(last, resumed, folder, TP, lora_rank, "third", "fourth")
    for state, own_checksum in found:
        assert own_checksum == checksum
        assert state.keys() == expected.keys()
        assert all(tensor.equal(expected[name]) for name, tensor in state.items())

    exports = [load_file(folder / name / "huggingface" / "model.safetensors") for name in NAMES]
    for export in exports[1:]:
        assert export.keys() == exports[0].keys()
        assert all(tensor.equal(exports[0][name]) for name, tensor in export.items())


NAMES = ("first", "second", "third", "fourth")


@pytest.mark.parametrize("family", ["mixtral", "qwen3"])
def test_a_checkpoint_of_cut_matrices_resumes_in_any_layout(tmp_path: Path, family: str) -> None:
    assert_resumes(tmp_path, family, 2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", CUT)
def test_every_family_resumes_in_any_layout(tmp_path: Path, family: str) -> None:
    assert_resumes(tmp_path, family, 2, 4)


@pytest.mark.slow
def test_an_adapter_resumes_in_any_layout(tmp_path: Path) -> None:
    assert_resumes(tmp_path, "qwen3", 2, 2, lora_rank=4)
