"""The reference that follows the actor: when its weights move, and by which way.

It is moved after the weight sync, so the next step's KL is to the new reference.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from workers.weights.sync import sync_weights

if TYPE_CHECKING:
    from trainer.groups.worker_groups import WorkerGroups
    from trainer.ppo.config import PPOConfig


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
