"""Weights on their way from the trainers to the makers: published once, taken by each in its time.

`publish` is called between two updates, and copies; `deliver` is called in a maker's thread, and
sends that copy while the trainers go on.
"""

from __future__ import annotations

from trainer.detached.config import DetachedConfig
from trainer.detached.sync_log import SyncLog
from trainer.detached.topology import Topology, maker_role
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics
from verl_like.errors import WeightSyncError
from workers.weights.delivery import deliver_weights, publish_weights


class WeightFeed:
    """The trainers' newest weights, for any maker that asks."""

    def __init__(self, config: DetachedConfig, groups: WorkerGroups, topology: Topology) -> None:
        """Nothing is published yet."""
        self._groups, self._topology = groups, topology
        self._bucket_mb = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
        self._log = SyncLog(config.trainer.default_local_dir) if config.detached.debug else None
        self.version = 0

    def publish(self, version: int) -> Metrics:
        """The weights as they are now are that version, on the ranks that send."""
        senders = sorted({sender for sender, _ in self._topology.weights})
        metrics = publish_weights(self._groups["actor"], version, senders)
        self.version = version
        return metrics | {"training/weight_version": float(version)}

    def deliver(self, maker: int) -> int:
        """Bring that maker to the newest weights; gives their version."""
        sender = self._topology.weight_sender(maker)
        while True:
            version = self.version
            try:
                actor, rollout = self._groups["actor"], self._groups[maker_role(maker)]
                figures = deliver_weights(actor, rollout, version, self._bucket_mb, sender)
            except WeightSyncError:
                if version == self.version:
                    raise
                continue  # newer ones were published meanwhile, and the older are gone
            if self._log is not None:
                self._log.add(maker, figures)
            return version
