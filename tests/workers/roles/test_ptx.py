"""PTX: the language-model loss next to the policy's, in one optimizer step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.gradients import Gradients, assert_equal_gradients
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, make_batch, own_chunk, started, text_rows, tiny_config
from verl_like.batch.protocol import DataProto
from workers.parallel.fsdp import full_tensor
from workers.roles.actor import ActorWorker
from workers.training.engine import INPUTS
from workers.training.loss import lm_loss
from workers.training.microbatch import MicroBatchBudget, MiniBatch, Rows, mini_batch

COEF = 0.7
POLICY, TEXT = 8, 6


def actor_of(one_layer_dir: Path, **actor: Any) -> ActorWorker:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=POLICY // 2, **actor)
    config.ptx.coef = COEF
    return started(ActorWorker, config, 10)


def mini_batch_of(actor: ActorWorker, data: DataProto, *names: str) -> MiniBatch:
    rows = Rows.from_batch(data, (*INPUTS, *names), actor.world_size)
    return mini_batch(rows, 0, 1, actor.engine.groups.data)


def gradients_of(actor: ActorWorker, losses: str, budget: MicroBatchBudget) -> Gradients:
    """Return the gradients of the policy's loss, of PTX, or of both in one step."""
    engine = actor.engine
    policy = own_chunk(make_batch(POLICY), actor.rank, actor.world_size)
    text = own_chunk(text_rows(TEXT), actor.rank, actor.world_size)
    text_batch = mini_batch_of(actor, text)
    with engine.running(engine.optimizer):
        if losses == "ptx":
            engine.forward_backward(text_batch, budget, actor.ptx_loss)
        else:
            batch = mini_batch_of(actor, policy, "old_log_probs", "advantages")
            engine.forward_backward(batch, budget, actor.objective(policy).loss)
            if losses == "both":
                engine.forward_backward(text_batch, budget, actor.ptx_loss)
        engine.sum_gradients()
    weights = engine.module.named_parameters()
    gradients = {name: full_tensor(weight.grad).clone() for name, weight in weights}
    engine.optimizer.zero_grad()
    return gradients


def test_the_gradient_is_the_policy_s_plus_the_scaled_language_model_gradient(
    one_layer_dir: Path,
) -> None:
    actor = actor_of(one_layer_dir)
    policy, ptx, both = (
        gradients_of(actor, losses, MicroBatchBudget(rows=3))
        for losses in ("policy", "ptx", "both")
    )
    assert_equal_gradients(both, {name: policy[name] + ptx[name] for name in policy})

    rows = text_rows(TEXT).batch
    mask = rows["response_mask"].bool()
    logits = actor.engine.module(rows["input_ids"], attention_mask=rows["attention_mask"]).logits
    losses = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), rows["responses"], reduction="none"
    )
    actor.engine.optimizer.zero_grad()
    (COEF * losses[mask].mean()).backward()
    plain = {name: weight.grad for name, weight in actor.engine.module.named_parameters()}
    for name, grad in plain.items():
        assert (ptx[name] - grad).norm() <= 1e-5 * grad.norm(), name


def test_the_division_into_passes_does_not_change_the_gradient(one_layer_dir: Path) -> None:
    actor = actor_of(one_layer_dir)
    expected = gradients_of(actor, "both", MicroBatchBudget(rows=POLICY))
    assert_equal_gradients(gradients_of(actor, "both", MicroBatchBudget(tokens=25)), expected)


def on_ranks(one_layer_dir: Path, strategy: str) -> dict[str, Any]:
    actor = actor_of(one_layer_dir, strategy=strategy)
    grads = gradients_of(actor, "both", MicroBatchBudget(rows=1))
    policy = own_chunk(make_batch(POLICY), actor.rank, actor.world_size)
    text = own_chunk(text_rows(TEXT), actor.rank, actor.world_size)
    metrics = learned(actor.update_actor(policy, text))
    return {"gradients": grads, "metrics": metrics, "weights": actor.weights_checksum()}


@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_ranks_train_like_one(one_layer_dir: Path, strategy: str) -> None:
    alone = on_ranks(one_layer_dir, strategy)
    ranks = run_kept(2, on_ranks, one_layer_dir, strategy)
    assert_equal_gradients(ranks[0]["gradients"], alone["gradients"])
    assert ranks[0]["metrics"] == pytest.approx(alone["metrics"], rel=1e-4, abs=1e-6)
    assert ranks[0]["weights"] == ranks[1]["weights"]


def test_every_optimizer_step_trains_on_an_equal_share_of_the_text(one_layer_dir: Path) -> None:
    actor = actor_of(one_layer_dir, ppo_epochs=2)
    num_rows: list[int] = []
    ptx_loss = actor.ptx_loss

    def counted(outputs: Any, columns: Any, batch: MiniBatch) -> Any:
        num_rows.append(batch.num_rows)
        return ptx_loss.compute(outputs, columns, batch)

    actor.ptx_loss = replace(ptx_loss, compute=counted)
    metrics = actor.update_actor(make_batch(POLICY), text_rows(12))
    assert num_rows == [3, 3, 3, 3]
    assert 3 < metrics["actor/ptx_loss"] < 5


def test_a_coefficient_of_zero_changes_nothing_but_the_metric(one_layer_dir: Path) -> None:
    with_text, without = actor_of(one_layer_dir), actor_of(one_layer_dir)
    with_text.ptx_loss = lm_loss(0.0, "ptx_loss")
    metrics = with_text.update_actor(make_batch(POLICY), text_rows(TEXT))
    assert metrics["actor/ptx_loss"] > 0
    assert "actor/ptx_loss" not in without.update_actor(make_batch(POLICY))
    assert with_text.weights_checksum() == without.weights_checksum()
