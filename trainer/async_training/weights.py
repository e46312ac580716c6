"""Weight transfer from trainers to generators: published once, fetched by each generator.

`publish` is called between two updates and copies the weights. `deliver` is called in a generator's
thread and sends that copy while the trainers keep working. A generator that has a copy of the
critic gets the critic's weights in the same way, after the actor's.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from trainer.async_training.activity import Activity
from trainer.async_training.buffer import ExperienceBuffer
from trainer.async_training.chunks import Rounds
from trainer.async_training.config import AsyncConfig
from trainer.async_training.topology import CRITIC_COPY, role_on
from trainer.run_state import Metrics, Run
from verl_like.errors import WeightSyncError
from verl_like.process.machine import resident_bytes
from workers.weights.sync import deliver_weights, publish_weights

SYNCS_FILE = "syncs.jsonl"
MIB = 2**20


class SyncLog:
    """Logs the bytes, seconds and driver memory of each delivery. Generators' threads call it."""

    def __init__(self, folder: str | Path) -> None:
        """A resumed run appends to the existing file."""
        self._path = Path(folder) / SYNCS_FILE
        self._lock = threading.Lock()

    def add(self, generator: int, role: str, figures: Mapping[str, float]) -> None:
        """Write the figures of one delivery to this role of the generator."""
        line = {
            "time": time.time(),
            "version": round(figures["training/weight_version"]),
            "generator": generator,
            "role": role,
            "seconds": figures["timing_s/weight_sync"],
            "hash_s": figures["perf/weight_sync_hash_s"],
            "bytes": round(figures["perf/weight_sync_mib"] * MIB),
            "driver_rss_bytes": resident_bytes(os.getpid()),
        }
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class WeightFeed:
    """The trainers' newest weights, which any generator can fetch."""

    def __init__(
        self, run: Run, buffer: ExperienceBuffer, rounds: Rounds, activity: Activity
    ) -> None:
        """`buffer` announces new versions to the generators."""
        config: AsyncConfig = run.config  # type: ignore[assignment]
        self._run, self._groups, self._topology = run, run.groups, config.topology
        self._buffer, self._rounds, self._activity = buffer, rounds, activity.of("trainer")
        self.version = 0
        """The newest version that generators can take."""
        self._bucket_mb = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
        logs = config.async_training.log_syncs
        self._log = SyncLog(config.trainer.default_local_dir) if logs else None
        self._critic_version: int | None = None
        self._has_critic_copies = CRITIC_COPY in config.score_roles

    def send_next(self) -> Metrics:
        """Publish the weights as a new version if a round has ended.

        During a validation, averaged weights, and then the policy's own weights again, are
        published under the same version.
        """
        version = self.version
        if not self._buffer.is_paused:
            if version and not self._rounds.ends_with(self._run.step):
                return {}
            version += 1
        with self._activity.syncing(f"weights of version {version}"):
            metrics = self.publish(version)
        self.version = version
        self._buffer.publish(version)
        return metrics

    def sleep_if_needed(self) -> None:
        """Do nothing: generators go on while the other roles compute."""

    def publish(self, version: int) -> Metrics:
        """Copy the current weights as this version on the ranks that send them."""
        senders = sorted({sender for sender, _ in self._topology.weights})
        copies = {}
        # a version is published again around a validation, but the critic's weights do not change
        if self._has_critic_copies and version != self._critic_version:
            # before the actor's weights, so that a generator never gets an older critic
            figures = publish_weights(self._groups["critic"], version, senders, self._bucket_mb)
            self._critic_version = version
            copies = {"timing_s/publish_critic_weights": figures["timing_s/publish_weights"]}
        metrics = copies | publish_weights(self._groups["actor"], version, senders, self._bucket_mb)
        return metrics | {"training/weight_version": float(version)}

    def deliver(self, generator: int) -> int:
        """Send the newest weights to a generator, and return their version."""
        version = self._deliver(generator, "actor", "rollout")
        if self._has_critic_copies:
            self._deliver(generator, "critic", CRITIC_COPY)
        return version

    def _deliver(self, generator: int, sends: str, kind: str) -> int:
        role, sender = role_on(kind, generator), self._topology.weight_sender(generator)
        try:
            figures = deliver_weights(self._groups[sends], self._groups[role], sender=sender)
        except WeightSyncError as error:
            error.add_note(f"The {sends} was sending to generator {generator} ({role}).")
            raise
        if self._log is not None:
            self._log.add(generator, role, figures)
        return int(figures["training/weight_version"])
