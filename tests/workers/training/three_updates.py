"""Passes and updates of both roles, for ranks that share a model and for one process."""

from __future__ import annotations

from typing import Any

from tests.workers.gradients import ACTOR_COLUMNS, gradients
from tests.workers.samples import learned, make_batch, own_chunk, weights_of
from verl_like.batch.protocol import DataProto
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.training.microbatch import MicroBatchBudget


def chunk_of(actor: ActorWorker, num_rows: int) -> DataProto:
    """Return the rows of a batch that this rank gets."""
    dims = actor.engine.dims
    return own_chunk(make_batch(num_rows), dims.data_rank(actor.rank), dims.data_size)


def three_updates(
    actor: ActorWorker, critic: CriticWorker, data: DataProto, budget: MicroBatchBudget
) -> dict[str, Any]:
    """Return log-probs, gradients and three updates of actor and critic on the rank's rows."""
    start, real = data.shard.start if data.shard else 0, data.num_real_rows
    return {
        "rows": slice(start, start + real),
        "log_probs": actor.compute_log_prob(data)[0].batch["old_log_probs"][:real],
        "gradients": gradients(actor, data, ACTOR_COLUMNS, budget),
        "critic_gradients": gradients(critic, data, ("values", "returns"), budget),
        "metrics": [learned(actor.update_actor(data)) for _ in range(3)],
        "critic_metrics": [learned(critic.update_critic(data)) for _ in range(3)],
        "weights": weights_of(actor),
        "critic_weights": weights_of(critic),
    }
