"""Every policy loss and value loss over ranks and micro-batches: the gradients of one call."""

from __future__ import annotations

from pathlib import Path

from tests.workers.gradients import ACTOR_COLUMNS, Gradients, assert_equal_gradients, gradients
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config
from workers.losses.registry import POLICY_LOSSES
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.microbatch import MicroBatchBudget

ROWS = 7
HEADS = ("lm_head", "score")


def gradients_by_loss(one_layer_dir: Path, rows_of_a_pass: int) -> dict[str, Gradients]:
    """Return loss name -> the gradients of the heads for one mini-batch of all rows."""
    config = tiny_config(
        one_layer_dir, ppo_mini_batch_size=ROWS, loss_agg_mode="seq-mean-token-mean"
    )
    actor, critic = started(ActorWorker, config, 10), started(CriticWorker, config, 10)
    batch, budget = make_batch(ROWS), MicroBatchBudget(rows=rows_of_a_pass)
    batch.batch["chosen_tokens"] = batch.batch["advantages"] > 0.5

    found = {}
    for name, loss in POLICY_LOSSES.items():
        actor.objective_settings.policy_loss = loss
        data = own_chunk(batch, actor.rank, actor.world_size)
        found[name] = gradients(actor, data, (*ACTOR_COLUMNS, "chosen_tokens"), budget, HEADS)
    data = own_chunk(batch, critic.rank, critic.world_size)
    found["values"] = gradients(critic, data, ("values", "returns"), budget, HEADS)
    return found


def test_ranks_and_cuts_change_no_gradient(one_layer_dir: Path) -> None:
    alone = gradients_by_loss(one_layer_dir, ROWS)
    for result in run_kept(2, gradients_by_loss, one_layer_dir, 1, deadline_s=120.0):
        for name, grads in result.items():
            assert grads, "the head has another name"
            assert_equal_gradients(grads, alone[name])
