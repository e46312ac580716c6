"""The fifth stage: send the actor's weights to the rollout, and to a reference that follows it.

The reference is updated after the weight sync, so the next step's KL is to the new reference. A
validation may use the moving average of the weights (`actor.ema_decay`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from trainer.config.devices import run_devices
from trainer.ppo.memory import engine_sleeps
from trainer.run_state import Metrics
from workers.config import ActorConfig
from workers.weights.sync import sync_weights

if TYPE_CHECKING:
    from trainer.groups.worker_groups import WorkerGroups
    from trainer.ppo.config import PPOConfig


class PolicyWeights(Protocol):
    """Sends the actor's weights, as numbered versions, to the roles that generate.

    Example:

        metrics = weights.send_next()      # the fifth stage
    """

    version: int
    """The version of the weights that generate the next samples."""

    def send_next(self) -> Metrics:
        """Send the current weights as the next version, if one is due."""

    def sleep_if_needed(self) -> None:
        """Let engines sleep until the next weights, if other roles need their memory."""


class RolloutWeights:
    """Sends weights to the role `rollout`, and verifies each transfer."""

    def __init__(self, config: PPOConfig, groups: WorkerGroups) -> None:
        self._groups = groups
        self._bucket_mb = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
        self._engine_sleeps = engine_sleeps(config, run_devices(config.trainer).type)
        self.version = 0

    def sleep_if_needed(self) -> None:
        """Free the rollout's memory for other roles until the next weights arrive."""
        if self._engine_sleeps and "rollout" in self._groups:
            self._groups["rollout"].sleep()

    def send_next(self) -> Metrics:
        """Send the current weights as the next version."""
        metrics = self._send(self.version + 1)
        self.version += 1
        return metrics

    def send_again(self) -> Metrics:
        """Send the current weights, with the same version, to a restarted rollout."""
        return self._send(self.version)

    def _send(self, version: int) -> Metrics:
        return sync_weights(
            self._groups["actor"], self._groups["rollout"], version, self._bucket_mb
        )


def update_reference(config: PPOConfig, groups: WorkerGroups, step: int) -> Metrics:
    """Send the actor's weights to the reference if an update is due after this step."""
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
    """Let the rollout generate with averaged weights inside the block; then restore its weights.

    Without `actor.ema_decay`, do nothing. `sync` sends the weights that `actor`, the worker group,
    uses. In a synchronous run every sync is a new version, so the version of a sample shows whether
    it comes from averaged weights.
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
