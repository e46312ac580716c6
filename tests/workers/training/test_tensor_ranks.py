"""Whole updates whose matrices are cut over several ranks, against one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers import distributed
from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import (
    learned,
    make_batch,
    own_piece,
    started,
    tiny_config,
    weights_of,
)
from tests.workers.training.test_sequence_ranks import (
    FAMILIES,
    NUM_ROWS,
    WITH_ROUTER_LOSS,
    distance,
    saved,
)
from workers.config import OptimConfig, ParallelConfig
from workers.parallel import sharding
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.microbatch import Budget

CUT = [family for family in FAMILIES if family not in ("gpt-oss", "outnumbered heads")]
CUT.remove("qwen2, one head of keys")
CHANGES: dict[str, dict[str, Any]] = {
    "three micro-batches": {"rows": 3},
    "one micro-batch": {"rows": NUM_ROWS},
    "checkpointing": {"rows": 3, "enable_gradient_checkpointing": True},
    "whole weights": {"rows": 3, "strategy": "ddp"},
    "lora": {"rows": 3, "lora_rank": 4, "target_modules": "all-linear"},
    "lora at once": {"rows": NUM_ROWS, "lora_rank": 4, "target_modules": "all-linear"},
}
FOUR: dict[str, dict[str, Any]] = {
    "shards, too": {"rows": 2},
    "copies, too": {"rows": 2, "fsdp_size": 1},
    "whole weights": {"rows": 2, "strategy": "ddp"},
    "sequences, too": {"rows": 2, "sp": 2},
    "lora": {"rows": 2, "lora_rank": 4, "target_modules": "all-linear"},
}


def trained(folder: Path, family: str, change: dict[str, Any]) -> dict[str, Any]:
    """Log-probs, gradients and three updates of actor and critic."""
    change, world = dict(change), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        sharding.NOT_YET = {}
    rows = change.pop("rows")
    config = tiny_config(folder, ppo_mini_batch_size=NUM_ROWS, entropy_coeff=0.01)
    actor_section = config.actor_rollout_ref.actor
    actor_section.optim = config.critic.optim = OptimConfig(lr=1e-4, eps=1e-4)
    actor_section.ppo_micro_batch_size_per_gpu = rows
    if family in WITH_ROUTER_LOSS and "lora_rank" not in change:
        actor_section.router_aux_loss_coef = 0.5
    actor_section.strategy = change.pop("strategy", "fsdp")
    fsdp_size, sp = change.pop("fsdp_size", -1), change.pop("sp", 1)
    if world > 1:
        actor_section.fsdp_config.fsdp_size = fsdp_size
        config.critic.strategy = actor_section.strategy
        config.critic.model.fsdp_config.fsdp_size = actor_section.fsdp_config.fsdp_size
        actor_section.parallel = config.critic.parallel = ParallelConfig(tp=2, sp=sp)
    for name, value in change.items():
        setattr(config.actor_rollout_ref.model, name, value)
        setattr(config.critic.model, name, value)

    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    dims = actor.engine.dims
    data = own_piece(make_batch(NUM_ROWS), dims.data_rank(actor.rank), dims.data_size)
    start, real = data.shard.start, data.num_real_rows
    budget = Budget(rows=rows)
    return {
        "rows": slice(start, start + real),
        "loaded": actor.weights_checksum(),
        "log_probs": actor.compute_log_prob(data)[0].batch["old_log_probs"][:real],
        "gradients": gradients(actor, data, ACTOR_COLUMNS, budget),
        "critic_gradients": gradients(critic, data, ("values", "returns"), budget),
        "metrics": [learned(actor.update_actor(data)) for _ in range(3)],
        "critic_metrics": [learned(critic.update_critic(data)) for _ in range(3)],
        "weights": weights_of(actor),
        "critic_weights": weights_of(critic),
    }


def assert_trains_as_one(folder: Path, family: str, num_ranks: int, how: dict[str, Any]) -> None:
    saved(folder, family)
    alone = trained(folder, family, how)
    # torch keeps meshes of equal looks, whose groups end with a test of a kept process
    run = run_kept if num_ranks == 2 else distributed.run
    for result in run(num_ranks, trained, folder, family, how, deadline_s=150):
        assert result["loaded"] == alone["loaded"]
        expected = alone["log_probs"][result["rows"]]
        torch.testing.assert_close(result["log_probs"], expected, atol=1e-6, rtol=0)
        for role in ("", "critic_"):
            errors = [
                distance(result[f"{role}{what}"], alone[f"{role}{what}"])
                for what in ("gradients", "weights")
            ]

            assert distance(result[f"{role}gradients"], alone[f"{role}gradients"]) < 2e-6
            assert distance(result[f"{role}weights"], alone[f"{role}weights"]) < 1e-6
            for ours, theirs in zip(result[f"{role}metrics"], alone[f"{role}metrics"], strict=True):
                assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", CUT)
def test_ranks_that_share_matrices_train_as_one(tmp_path: Path, family: str, change: str) -> None:
    assert_trains_as_one(tmp_path, family, 2, CHANGES[change])


@pytest.mark.parametrize("change", FOUR)
@pytest.mark.parametrize("family", CUT)
def test_four_ranks_share_rows_and_matrices(tmp_path: Path, family: str, change: str) -> None:
    assert_trains_as_one(tmp_path, family, 4, FOUR[change])
