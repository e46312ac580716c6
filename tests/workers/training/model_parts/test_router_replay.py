"""Passes and updates with the experts that the rollout chose."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_chunk, started, tiny_config, weights_of
from tests.workers.training.rank_layouts import distance, saved
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.errors import BatchError, MissingColumnError
from workers.config import OptimConfig, ParallelConfig
from workers.models.routing import Routers
from workers.roles.actor import ActorWorker
from workers.training.microbatch import MicroBatchBudget
from workers.training.model_parts.layers import RouterReplay

NUM_ROWS = 7
FAMILIES = ("mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss")


def actor_of(folder: Path, mode: str = "R3", **change: Any) -> ActorWorker:
    """Return an actor with these axes, which one process leaves out, and settings of the model."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    parallel = {axis: min(change.pop(axis, 1), world) for axis in ("pp", "sp", "ep", "tp")}
    actor = {
        "ppo_mini_batch_size": NUM_ROWS,
        "optim": OptimConfig(lr=1e-4, eps=1e-4),
        "router_aux_loss_coef": change.pop("router_aux_loss_coef", 0.0),
    }
    config = tiny_config(folder, ParallelConfig(**parallel), change, **actor)
    config.actor_rollout_ref.actor.router_replay.mode = mode
    return started(ActorWorker, config, 10)


def routers_of(actor: ActorWorker) -> Routers:
    """Return the routers of the actor's model."""
    part = actor.engine.part(RouterReplay)
    assert part is not None
    return part.routers


def own_choices(actor: ActorWorker) -> list[Tensor]:
    """Return the choices of the actor's routers for each row."""
    batch, module = make_batch(NUM_ROWS).batch, actor.engine.module
    rows = []
    for tokens, mask in zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True):
        with torch.no_grad(), routers_of(actor).recording() as choices:
            module(input_ids=tokens[mask][None], use_cache=False)
            rows.append(choices.pop_choices())
    return rows


def with_column(batch: DataProto, rows: list[Tensor]) -> DataProto:
    """Return a ragged column, or a rectangle if the batch is one."""
    lengths = batch.padded("attention_mask").sum(dim=1)
    width = batch.padded("input_ids").shape[1]
    starts = batch.padded("attention_mask").int().argmax(dim=1)
    column = RaggedTensor(torch.cat(rows), lengths, width, starts)
    return batch.set_columns({"routed_experts": column})


def any_choices(actor: ActorWorker, seed: int = 0) -> list[Tensor]:
    """Return random experts for each token and layer."""
    generator = torch.Generator().manual_seed(seed)
    routers = routers_of(actor)
    layers, num_chosen = routers.shape
    lengths = make_batch(NUM_ROWS).batch["attention_mask"].sum(dim=1).tolist()
    rows = []
    for length in lengths:
        scores = torch.rand(length, layers, routers.num_experts, generator=generator)
        rows.append(scores.topk(num_chosen).indices.to(torch.uint8))
    return rows


def test_replaying_the_routers_choices_changes_no_bit(tmp_path: Path) -> None:
    folder = saved(tmp_path, "mixtral")
    plain, actor = actor_of(folder, "disabled"), actor_of(folder)
    # choices are recorded row by row, and a router sees the same bits in a pass of several rows
    batch = with_column(make_batch(NUM_ROWS), own_choices(actor))
    expected = plain.compute_log_prob(make_batch(NUM_ROWS))[0]
    replayed = actor.compute_log_prob(batch)[0]
    assert torch.equal(replayed.batch["old_log_probs"], expected.batch["old_log_probs"])
    for _ in range(2):
        ours, theirs = actor.update_actor(batch), plain.update_actor(make_batch(NUM_ROWS))
        assert learned(ours) == learned(theirs)
        batch = with_column(batch, own_choices(actor))
    assert actor.engine.weights_checksum() == plain.engine.weights_checksum()


@pytest.mark.parametrize(("family", "packed"), [("mixtral", True), ("deepseek-v3", False)])
def test_experts_get_the_tokens_of_the_column(tmp_path: Path, family: str, packed: bool) -> None:
    actor = actor_of(saved(tmp_path, family), use_remove_padding=packed)
    rows = any_choices(actor)
    batch = with_column(make_batch(NUM_ROWS), rows)
    own = with_column(make_batch(NUM_ROWS), own_choices(actor))
    actor.config.ppo_micro_batch_size_per_gpu = 1
    with routers_of(actor).recording() as choices:
        replayed = actor.compute_log_prob(batch)[0].batch["old_log_probs"]
        used = choices.pop_choices()
    # the last token is not read; passes reorder rows
    expected = torch.cat([row[:-1] for row in rows])
    if packed:
        assert len(used) == len(expected)
        as_numbers = [chosen.flatten(1).long().sort(dim=0).values for chosen in (used, expected)]
        assert torch.equal(*as_numbers)
    difference = replayed - actor.compute_log_prob(own)[0].batch["old_log_probs"]
    assert difference.abs().max() > 1e-3


def test_checkpointed_layers_choose_the_same_experts_again(tmp_path: Path) -> None:
    folder = saved(tmp_path, "qwen3-moe")
    plain, again = actor_of(folder), actor_of(folder, enable_gradient_checkpointing=True)
    batch = with_column(make_batch(NUM_ROWS), any_choices(plain))
    columns = (*ACTOR_COLUMNS, "routed_experts")
    budget = MicroBatchBudget(rows=3)
    assert distance(*(gradients(actor, batch, columns, budget) for actor in (plain, again))) == 0


def trained(folder: Path, change: dict[str, Any]) -> dict[str, Any]:
    """Return log-probs and an update with the experts of a column."""
    actor = actor_of(folder, **change)
    dims = actor.engine.dims
    batch = with_column(make_batch(NUM_ROWS), any_choices(actor))
    data = own_chunk(batch, dims.data_rank(actor.rank), dims.data_size)
    start, real = data.shard.start if data.shard else 0, data.num_real_rows
    return {
        "rows": slice(start, start + real),
        "log_probs": actor.compute_log_prob(data)[0].batch["old_log_probs"][:real],
        "metrics": learned(actor.update_actor(data)),
        "weights": weights_of(actor),
    }


CHANGES: dict[str, dict[str, Any]] = {
    "experts": {"ep": 2},
    "experts, checkpointing": {"ep": 2, "enable_gradient_checkpointing": True},
    "tokens": {"sp": 2},
    "tokens, router loss": {"sp": 2, "router_aux_loss_coef": 0.5},
    "matrices": {"tp": 2},
    "layers": {"pp": 2},
    "layers, checkpointing": {"pp": 2, "enable_gradient_checkpointing": True},
    "shards": {},
    "lora": {"lora_rank": 4, "target_modules": "all-linear"},
}
QUICK = [("qwen3-moe", "experts, checkpointing"), ("mixtral", "tokens, router loss")]
QUICK += [("qwen3-moe", "layers, checkpointing")]


def cells() -> list[Any]:
    params = []
    for family in FAMILIES:
        for change in CHANGES:
            has_loss = family in ("mixtral", "qwen3-moe")
            if (change == "tokens, router loss" and not has_loss) or (
                change == "matrices" and family == "gpt-oss"
            ):
                continue
            marks = [] if (family, change) in QUICK else [pytest.mark.slow]
            params.append(pytest.param(family, change, marks=marks))
    return params


@pytest.mark.parametrize(("family", "change"), cells())
def test_two_ranks_replay_like_one(tmp_path: Path, family: str, change: str) -> None:
    folder = saved(tmp_path, family)
    one_rank = trained(folder, CHANGES[change])
    for result in run_kept(2, trained, folder, CHANGES[change], deadline_s=150):
        expected = one_rank["log_probs"][result["rows"]]
        torch.testing.assert_close(result["log_probs"], expected, atol=1e-6, rtol=0)
        assert distance(result["weights"], one_rank["weights"]) < 1e-6
        assert result["metrics"] == pytest.approx(one_rank["metrics"], rel=1e-4, abs=1e-6)


def test_a_batch_without_the_column_or_of_another_model_is_rejected(tmp_path: Path) -> None:
    actor = actor_of(saved(tmp_path, "mixtral"))
    batch = make_batch(NUM_ROWS)
    with pytest.raises(MissingColumnError, match="'routed_experts' .written by rollout.generate"):
        actor.compute_log_prob(batch)
    with pytest.raises(MissingColumnError, match="'routed_experts'"):
        actor.update_actor(batch)
    rows = any_choices(actor)
    three = [torch.cat([row, row[:, :1]], dim=1) for row in rows]
    with pytest.raises(BatchError, match=r"of \[3, 2\] per token, .* choose \[2, 2\]"):
        actor.compute_log_prob(with_column(batch, three))
    with pytest.raises(BatchError, match="experts 3 to 6, and a layer of the model has 4"):
        actor.update_actor(with_column(batch, [row + 3 for row in rows]))


def test_rows_without_the_column_use_the_routers(tmp_path: Path) -> None:
    """PTX rows have no column; a reference that is the actor without adapters reads none."""
    actor = actor_of(saved(tmp_path, "mixtral"))
    plain = actor_of(tmp_path, "disabled")
    batch = with_column(make_batch(NUM_ROWS), any_choices(actor))
    actor.compute_log_prob(batch)
    log_probs = [
        role.engine.forward_rows(make_batch(NUM_ROWS), MicroBatchBudget(rows=3))["log_probs"]
        for role in (actor, plain)
    ]
    assert torch.equal(*log_probs)
