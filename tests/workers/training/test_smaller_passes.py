"""A mini-batch that runs out of memory is repeated in smaller passes, on one rank or on several."""

from __future__ import annotations

import functools
import os
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_chunk, started, tiny_config, weights_of
from workers.parallel import sharding
from workers.roles.actor import ActorWorker
from workers.training.loss import Loss, lm_loss
from workers.training.microbatch import MicroBatchBudget
from workers.training.update import forward_backward_with_retry


def tiny_actor(tiny_dir: Path, **actor: Any) -> ActorWorker:
    return started(ActorWorker, tiny_config(tiny_dir, **actor), 10)


def out_of_memory(actor: Any, most_rows: int) -> list[int]:
    """Let passes of more rows run out of memory; return the list of the passes' rows."""
    passes: list[int] = []
    policy_loss = actor.objective_settings.policy_loss

    def needs_memory(**columns: Any) -> Any:
        passes.append(len(columns["log_prob"]))
        if passes[-1] > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return policy_loss(**columns)

    actor.objective_settings.policy_loss = needs_memory
    return passes


def test_a_mini_batch_out_of_memory_is_repeated_in_smaller_passes(
    tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    actor, small = (
        tiny_actor(tiny_dir, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=rows)
        for rows in (4, 1)
    )
    passes = out_of_memory(actor, most_rows=1)
    metrics, expected = actor.update_actor(make_batch(8)), small.update_actor(make_batch(8))
    assert passes == [4, 2, 1, 1, 1, 1, 1, 1, 1, 1], "the second mini-batch fits at once"
    assert actor.weights_checksum() == small.weights_checksum()
    assert metrics["actor/pg_loss"] == expected["actor/pg_loss"]
    assert metrics["actor/grad_norm"] == expected["actor/grad_norm"]
    assert "CUDA out of memory: the mini-batch is repeated in passes of 2 rows" in caplog.text


def test_a_single_row_out_of_memory_ends_the_run(tiny_dir: Path) -> None:
    actor = tiny_actor(tiny_dir, ppo_mini_batch_size=2, ppo_micro_batch_size_per_gpu=2)
    passes = out_of_memory(actor, most_rows=0)
    with pytest.raises(torch.OutOfMemoryError):
        actor.update_actor(make_batch(2))
    assert passes == [2, 1]


def test_smaller_passes_have_room_for_the_longest_row() -> None:
    passes: list[int | None] = []

    def train(_: Any, fitting: MicroBatchBudget, __: Loss) -> dict[str, float]:
        passes.append(fitting.tokens)
        if (fitting.tokens or 0) > 700:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {}

    engine: Any = SimpleNamespace(
        is_alone=True,
        device="cpu",
        groups=SimpleNamespace(data=None),
        has_gradients=False,
        spec=SimpleNamespace(router_aux_loss_coef=0.0),
        forward_backward=train,
        reading=SimpleNamespace(reads=lambda lengths: lengths),
        row_passes=SimpleNamespace(lengths=list),
        smaller_budgets={},
    )
    budget = MicroBatchBudget(tokens=1000)
    for longest in (600, 650, 200):
        batch: Any = SimpleNamespace(columns=[longest, 100])
        forward_backward_with_retry(engine, batch, budget, lm_loss())
    assert passes == [1000, 600, 650, 600]
    batch = SimpleNamespace(columns=[800])
    with pytest.raises(torch.OutOfMemoryError):
        forward_backward_with_retry(engine, batch, budget, lm_loss())


def fail_in(actor: Any, place: str, most_rows: int) -> list[int]:
    """Let passes of more rows run out of memory in a place; return the list of the passes' rows."""
    passes: list[int] = []
    layer = actor.engine.module.model.layers[-1].mlp

    def fail() -> None:
        if passes[-1] > most_rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")

    outputs = actor.engine.reading.outputs

    def noted_outputs(columns: Any, token_outputs: Any) -> Any:
        passes.append(int(columns["input_ids"].lengths.count_nonzero()))
        return outputs(columns, token_outputs)

    actor.engine.reading.outputs = noted_outputs
    if place == "forward":
        layer.register_forward_pre_hook(lambda *_: fail())
    if place == "backward":
        layer.register_full_backward_pre_hook(lambda *_: fail())
    if place == "loss":
        policy_loss = actor.objective_settings.policy_loss

        def needs_memory(**columns: Any) -> Any:
            fail()
            return policy_loss(**columns)

        actor.objective_settings.policy_loss = needs_memory
    return passes


def update_on_ranks(
    tiny_dir: Path, rows: int, change: dict[str, Any], place: str = "", most_rows: int = 1
) -> dict[str, Any]:
    """Return two updates of two mini-batches; the second rank runs out of memory in a place."""
    sharding.SMALL_ELEMENTS = change.get("small", sharding.SMALL_ELEMENTS)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config = tiny_config(tiny_dir, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=rows)
    config.actor_rollout_ref.actor.strategy = change["strategy"]
    config.actor_rollout_ref.actor.fsdp_config = {"fsdp_size": change.get("fsdp_size", -1)}
    config.actor_rollout_ref.model.enable_gradient_checkpointing = change.get("recomputes", False)
    actor: Any = started(ActorWorker, config, 10)
    passes = fail_in(actor, place if rank == 1 else "", most_rows)
    metrics = [
        learned(actor.update_actor(own_chunk(make_batch(16, seed), rank, world))) for seed in (0, 1)
    ]
    return {"metrics": metrics, "weights": weights_of(actor), "passes": passes}


LAYOUTS: dict[str, dict[str, Any]] = {
    "whole weights": {"strategy": "ddp"},
    "one unit": {"strategy": "fsdp"},
    "layers apart": {"strategy": "fsdp", "small": 0},
    "layers apart, recomputed": {"strategy": "fsdp", "small": 0, "recomputes": True},
    "gathered once": {"strategy": "shard_grad_op", "small": 0},
}


@functools.cache
def fitting_update(tiny_dir: Path, layout: str) -> dict[str, Any]:
    """Return the updates of the first rank if each pass has one row."""
    result: dict[str, Any] = run_kept(2, update_on_ranks, tiny_dir, 1, LAYOUTS[layout])[0]
    return result


@pytest.mark.parametrize(
    ("layout", "place"),
    [*product(LAYOUTS, ("forward", "backward")), ("layers apart", "loss")],
)
def test_all_ranks_repeat_a_mini_batch_if_one_runs_out_of_memory(
    tiny_dir: Path, layout: str, place: str
) -> None:
    change = LAYOUTS[layout]
    first, second = run_kept(2, update_on_ranks, tiny_dir, 4, change, place)
    expected = fitting_update(tiny_dir, layout)
    assert first["metrics"] == second["metrics"] == expected["metrics"]
    for name, weight in expected["weights"].items():
        assert torch.equal(weight, first["weights"][name]), name
    ones = [1, 1, 1, 1]  # zero is a row without tokens
    assert first["passes"] == [4, 2, 2, *ones, *ones, *ones, *ones]
    assert second["passes"] == [4, 0, 2, 0, 0, *ones, *ones, *ones, *ones]


@pytest.mark.long
def test_all_replicas_of_sharded_weights_repeat_a_mini_batch(tiny_dir: Path) -> None:
    change = {"strategy": "fsdp", "small": 0, "fsdp_size": 2}
    results = run_kept(4, update_on_ranks, tiny_dir, 2, change, "backward")
    expected = run_kept(4, update_on_ranks, tiny_dir, 1, change)
    assert [result["metrics"] for result in results] == [expected[0]["metrics"]] * 4
    assert results[1]["passes"] == [2, 0, *[1] * 8]


def test_the_pass_that_fails_may_be_a_later_one(tiny_dir: Path) -> None:
    layout = "layers apart"
    first, _ = run_kept(2, update_on_ranks, tiny_dir, 3, LAYOUTS[layout], "backward", 2)
    assert first["metrics"] == fitting_update(tiny_dir, layout)["metrics"]


def test_a_row_that_does_not_fit_ends_the_update_on_all_ranks(tiny_dir: Path) -> None:
    errors = run_kept(2, error_on_ranks, tiny_dir)
    assert "ran out of memory" in errors[0]
    assert "CUDA out of memory" in errors[1]


def error_on_ranks(tiny_dir: Path) -> str:
    """Return the error of an update in which no row of the second rank fits."""
    with pytest.raises(torch.OutOfMemoryError) as caught:
        update_on_ranks(tiny_dir, 2, LAYOUTS["one unit"], "forward", most_rows=0)
    return str(caught.value)
