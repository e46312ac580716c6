"""Weights on their way from the trainers to the makers: published once, taken by each in its time.

`publish` is called between two updates, and copies; `deliver` is called in a maker's thread, and
sends that copy while the trainers go on. To a maker with `rollout.double_buffer` it is sent as soon
as it is there, and `deliver` has it loaded. A maker that has a copy of the critic gets the critic's
weights in the same way, after the actor's.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trainer.detached.config import DetachedConfig
from trainer.detached.topology import Topology, maker_role, role_on
from trainer.groups.worker_groups import WorkerGroups
from trainer.loop import Metrics
from trainer.ppo.sizes import CRITIC_COPY
from verl_like.errors import WeightSyncError
from verl_like.process.machine import resident_bytes
from workers.weights.delivery import deliver_weights, load_delivered, publish_weights

SYNCS_FILE = "syncs.jsonl"
MIB = 2**20


class SyncLog:
    """Bytes, seconds and the driver's memory of each delivery; makers' threads call it."""

    def __init__(self, folder: str | Path) -> None:
        """A run that is gone on with adds to its file."""
        self._path = Path(folder) / SYNCS_FILE
        self._lock = threading.Lock()

    def add(self, maker: int, role: str, figures: Mapping[str, float]) -> None:
        """Write what `deliver_weights` has said of a delivery to this role of the maker's."""
        line = {
            "time": time.time(),
            "version": round(figures["training/weight_version"]),
            "maker": maker,
            "role": role,
            "seconds": figures["timing_s/weight_sync"],
            "hash_s": figures["perf/weight_sync_hash_s"],
            "bytes": round(figures["perf/weight_sync_mb"] * MIB),
            "driver_rss_bytes": resident_bytes(os.getpid()),
        }
        with self._lock, self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class WeightFeed:
    """The trainers' newest weights, for any maker that asks."""

    def __init__(self, config: DetachedConfig, groups: WorkerGroups, topology: Topology) -> None:
        """Nothing is published yet."""
        self._groups, self._topology = groups, topology
        self._bucket_mb = config.actor_rollout_ref.rollout.update_weights_bucket_megabytes
        self._log = SyncLog(config.trainer.default_local_dir) if config.detached.debug else None
        self._num_published = 0
        self._critic_version: int | None = None
        self._arrived: dict[int, tuple[Any, int]] = {}
        """By maker, the version that it has beside its engine, and the group that has it."""
        self._threads: dict[int, ThreadPoolExecutor] = {}
        for maker in range(topology.makers):
            if config.rollout_of(maker).double_buffer:
                self._threads[maker] = ThreadPoolExecutor(1, f"weights of maker {maker}")

    def publish(self, version: int) -> Metrics:
        """The weights as they are now are that version, on the ranks that send."""
        senders = sorted({sender for sender, _ in self._topology.weights})
        copies = {}
        # a version comes again where a validation has had other weights: the critic has one set
        if CRITIC_COPY in self._groups and version != self._critic_version:
            # before the actor's: who gets those finds the critic's no older
            figures = publish_weights(self._groups["critic"], version, senders, self._bucket_mb)
            self._critic_version = version
            copies = {"timing_s/publish_critic_weights": figures["timing_s/publish_weights"]}
        metrics = copies | publish_weights(self._groups["actor"], version, senders, self._bucket_mb)
        self._num_published += 1
        for maker, thread in self._threads.items():
            thread.submit(self._deliver_ahead, maker, self._num_published)
        return metrics | {"training/weight_version": float(version)}

    def deliver(self, maker: int) -> int:
        """Bring that maker to the newest weights; gives their version."""
        if maker not in self._threads:
            version = self._deliver(maker)
        else:  # in the thread of its deliveries: loading does not meet one
            version = self._threads[maker].submit(self._load, maker).result()
        if CRITIC_COPY in self._groups:
            self._deliver_critic(maker)
        return version

    def _deliver_critic(self, maker: int) -> None:
        role, sender = role_on(CRITIC_COPY, maker), self._topology.weight_sender(maker)
        groups = self._groups["critic"], self._groups[role]
        try:
            figures = deliver_weights(*groups, sender=sender)
        except WeightSyncError as error:
            error.add_note(f"It was to bring maker {maker}'s copy of the critic to the critic's.")
            raise
        self._note(maker, role, figures)

    def _deliver_ahead(self, maker: int, number: int) -> None:
        """Unless a publication with a higher number has come, which will be delivered next."""
        if number == self._num_published:
            self._arrived.pop(maker, None)
            rollout = self._groups[maker_role(maker)]
            self._arrived[maker] = rollout, self._deliver(maker, ahead=True)

    def _load(self, maker: int) -> int:
        """What has arrived; a maker that has nothing, or was started anew, is sent it now."""
        group, version = self._arrived.pop(maker, (None, 0))
        if group is not self._groups[maker_role(maker)]:
            return self._deliver(maker)
        load_delivered(group, version)
        return version

    def _deliver(self, maker: int, ahead: bool = False) -> int:
        role, sender = maker_role(maker), self._topology.weight_sender(maker)
        try:
            figures = deliver_weights(
                self._groups["actor"],
                self._groups[role],
                sender=sender,
                ahead=ahead,
            )
        except WeightSyncError as error:
            error.add_note(f"It was to bring maker {maker} ({role}) to the actor's.")
            raise
        self._note(maker, role, figures)
        return int(figures["training/weight_version"])

    def _note(self, maker: int, role: str, figures: Metrics) -> None:
        if self._log is not None:
            self._log.add(maker, role, figures)
