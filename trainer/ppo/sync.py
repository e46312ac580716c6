"""The fifth stage: the actor's weights go to the rollout, and to a reference that follows it.

The reference is moved after the weight sync, so the next step's KL is to the new reference. A
validation may have the moving average of the weights (`actor.ema_decay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workers.config import ActorConfig
from workers.weights.sync import sync_weights

if TYPE_CHECKING:
    from trainer.groups.worker_groups import WorkerGroups
    from trainer.ppo.config import PPOConfig


def send_weights(config: PPOConfig, groups: WorkerGroups, version: int) -> dict[str, float]:
    """The rollout has the actor's weights, as this version."""
    bucket_mb = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
    return sync_weights(groups["actor"], groups["rollout"], version, bucket_mb)


def update_reference(config: PPOConfig, groups: WorkerGroups, step: int) -> dict[str, float]:
    """Send the actor's weights to the reference, if `ref.update_every` says so after this step."""
    policy = config.actor_rollout_ref
    every = policy.ref.update_every
    if "ref" not in groups or every is None or step % every:
        return {}

    began = time.perf_counter()
    bucket_mb = policy.rollout.update_weights_bucket_megabytes
    sync_weights(groups["actor"], groups["ref"], step, bucket_mb, as_trained=True)
    return {
        "timing_s/update_reference": time.perf_counter() - began,
        "training/num_reference_updates": float(step // every),
    }


@contextmanager
def averaged_weights(config: ActorConfig, actor: Any, sync: Callable[[], Any]) -> Iterator[None]:
    """Within, the rollout generates with the average; after, with the policy's own weights again.

    `actor` is the actor's group. Each way is a `sync` with a weight version of its own, so no
    sample is taken for another's.
    """
    if config.ema_decay is None:
        yield
        return

    actor.use_average(True)
    try:
        sync()
        yield
    finally:
        actor.use_average(False)
        sync()
