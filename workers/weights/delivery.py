"""Weights for rollouts that the trainer does not wait for: published once, delivered to each.

    publish_weights(actor, version)                  # between updates: a copy in host memory
    deliver_weights(actor, rollout_1, version)       # from any thread, while the actor goes on
    deliver_weights(actor, rollout_2, version)       # at the same time, from another

    deliver_weights(actor, rollout_1, version, ahead=True)     # while the rollout goes on, too
    load_delivered(rollout_1, version)                         # between two generations

A delivery is verified and voted on as `workers.weights.sync` does it. It goes from host memory to
host memory, over gloo: nothing of it touches a GPU that is computing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any

from torch import Tensor

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import WeightSyncError
from verl_like.process.store import new_secret
from workers.weights.channel import HOST, Bucket, Channel, new_room, pack
from workers.weights.checksum import NamedTensors, Stopwatch, checksum_of
from workers.weights.connection import call_in_thread
from workers.weights.host_copy import effective_tensors
from workers.weights.sync import (
    Side,
    SyncReport,
    WeightSender,
    once_more_if_refused,
    reports_of_sides,
    send_changes,
    sync_figures,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PublishReport:
    """What one rank has published: nothing, if it was not asked to send.

    `changed_share` is that of the tensors that are not as in the version before, if there was one.
    """

    num_bytes: int = 0
    hash_s: float = 0.0
    changed_share: float | None = None


# ----------------------------------------------------------------------------------- in the driver


def publish_weights(
    actor_group: Any, version: int, senders: Sequence[int] = (0,), bucket_mb: float = 16.0
) -> dict[str, float]:
    """Keep the actor's weights as `version` in the host memory of the ranks that send them."""
    start = time.perf_counter()
    absent = [rank for rank in senders if not 0 <= rank < actor_group.world_size]
    if absent or not senders:
        raise WeightSyncError(
            f"version {version} cannot be published by ranks {list(senders)}: the actor has ranks "
            f"0 to {actor_group.world_size - 1}, and one of them at least must send."
        )
    reports: list[PublishReport] = actor_group.publish_weights(version, list(senders), bucket_mb)
    figures = {
        "timing_s/publish_weights": time.perf_counter() - start,
        "perf/published_mb": max(report.num_bytes for report in reports) / 2**20,
    }
    shares = [report.changed_share for report in reports if report.changed_share is not None]
    if shares:
        figures["training/weights_changed_share"] = min(shares)
        if min(shares) == 0:
            _warn_of_weights_that_stand_still()
    return figures


def deliver_weights(
    actor_group: Any,
    rollout_group: Any,
    version: int | None = None,
    sender: int = 0,
    ahead: bool = False,
) -> dict[str, float]:
    """Bring one rollout group to the published `version`, proven equal; call it from any thread.

    Without a version to the newest; `training/weight_version` says which one it was.

    The actor goes on with whatever it computes. The group takes the weights when it has ended the
    calls before, and its next ones wait: where samples are running, between two takes. With `ahead`
    it keeps them beside its engine, which goes on too, until `load_delivered`; to one group the two
    are called one after the other. What a rank refuses is sent once more. Raises `WeightSyncError`
    where it fails on any rank, with what both sides say, and `WorkerDiedError` where a rank of
    either side is gone.
    """
    how = sender, ahead
    return once_more_if_refused(partial(_deliver, actor_group, rollout_group, version, *how))


def _deliver(
    actor_group: Any,
    rollout_group: Any,
    version: int | None,
    sender: int,
    ahead: bool,
) -> dict[str, float]:
    start = time.perf_counter()
    if rollout_group.shares_processes_with(actor_group):
        raise WeightSyncError(
            "weights cannot be delivered to a rollout in the actor's own processes: "
            "sync_weights(actor_group, rollout_group, version) hands it over."
        )
    receive = rollout_group.receive_ahead if ahead else rollout_group.receive_weights
    address, version = actor_group.open_delivery(version, sender)[sender]

    # either group may run in the thread that calls it, so each side has one
    sending = _Sending(actor_group, address, rollout_group.world_size, sender)
    received = receive.remote(address, version)
    give_up = partial(actor_group.give_up_sync.remote, address, rollout_group.world_size)
    sides = [Side(future, int(version), give_up) for future in (received, sending)]
    return sync_figures(reports_of_sides(sides), int(version), start)


class _Sending:
    """The future of a sender's part in a delivery, which is made in a thread."""

    def __init__(self, actor_group: Any, address: str, num_receivers: int, sender: int) -> None:
        self._name = f"actor rank {sender}"
        what = address, num_receivers, sender
        self._future = call_in_thread(self._name, actor_group.deliver_weights, *what)

    def get(self, timeout: float | None = None) -> Any:
        """The reports of all ranks."""
        return self._future.result(timeout)

    def __str__(self) -> str:
        return self._name


@cache
def _warn_of_weights_that_stand_still() -> None:
    """Once per process."""
    logger.warning(
        "A new version of the weights is bit for bit the one before: no update in between has "
        "moved what a rollout gets. Are all advantages zero, is actor.optim.lr too small for the "
        "type of the rollout's weights (rollout.dtype), or does everything stand frozen? During "
        "trainer.critic_warmup it is as it should be."
    )


def load_delivered(rollout_group: Any, version: int) -> dict[str, float]:
    """Have a rollout group generate with the version that was delivered to it ahead."""
    start = time.perf_counter()
    reports: list[SyncReport] = rollout_group.load_received(version)
    return sync_figures(reports, version, start)


# -------------------------------------------------------------------------------- in the processes


class WeightPublisher(WeightSender):
    """Mixed into the actor's worker: snapshots of its weights, and their delivery beside its work.

    Deliveries come in threads of their own.
    """

    @cached_property
    def snapshots(self) -> Snapshots:
        """What is published; made in `publish_weights`, by the thread of this role's calls."""
        self.new_address()  # opens the store, where the environment is that of this role's calls
        return Snapshots()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(
        self, version: int, senders: Sequence[int] = (0,), bucket_mb: float = 16.0
    ) -> PublishReport:
        """Copy the full weights, in the type that a rollout gets them in, on these ranks.

        The newest version alone is kept; one that is being delivered stays until that has ended.
        """
        tensors = self.tensors_to_send(on_all_ranks=list(senders) != [0])
        try:
            if self.rank not in senders:
                return PublishReport()
            return self.snapshots.publish(version, tensors, bucket_mb, self.merging())
        finally:
            # The other actor ranks are in the same collectives: go through them to the end.
            deque(tensors, maxlen=0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def published_checksum(self, version: int) -> str | None:
        """Hash of a published version, comparable with a rollout's `weights_checksum`."""
        if "snapshots" not in vars(self):
            return None
        with self.snapshots.reading(version) as snapshot:
            return checksum_of(snapshot.effective())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def open_delivery(
        self, version: int | None = None, sender: int = 0
    ) -> tuple[str, int | None] | None:
        """The sender returns the address of a delivery and its version, which it holds for it.

        Without a version it is the newest.
        """
        if self.rank != sender:
            return None
        if "snapshots" not in vars(self):
            raise WeightSyncError(
                f"actor rank {self.rank} has published no version of its weights, so none can be "
                f"delivered from it: actor.publish_weights(version, senders=[{self.rank}])."
            )
        address = str(self.new_address())
        return address, self.snapshots.hold(version, address).version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def deliver_weights(self, address: str, num_receivers: int, sender: int = 0) -> SyncReport:
        """Send the version that was held for this address to the ranks that come to it."""
        if self.rank != sender:
            return SyncReport()
        snapshot = self.snapshots.held[address]

        def send(channel: Channel) -> None:
            drops = self.is_to_drop(snapshot.version)
            if snapshot.merging is None:
                channel.send(snapshot.buckets, drops_first=drops)
            else:
                limit = max((len(bucket.payload) for bucket in snapshot.buckets), default=1)
                send_changes(channel, snapshot.tensors.items(), limit, snapshot.merging, drops)

        try:
            return self.send_through(address, num_receivers, HOST, send)
        finally:
            del self.snapshots.held[address]


class Snapshot:
    """The full weights of one version in host memory, packed in buckets: a delivery copies nothing,
    and has next to nothing to do in Python beside the trainer's own work.
    """

    def __init__(self) -> None:
        self.version: int | None = None
        self.buckets: list[Bucket] = []
        self.tensors: dict[str, Tensor] = {}
        self.hashes: dict[str, int] = {}
        self.merging: dict[str, Any] | None = None
        """Where adapters come apart from their base: how they are put together."""
        self.watch = Stopwatch()
        self._rooms: list[Tensor] = []

    def fill(
        self,
        version: int,
        tensors: NamedTensors,
        bucket_mb: float,
        merging: dict[str, Any] | None = None,
    ) -> None:
        """Copy these tensors, into the memory of what it held before."""
        self.version, self.merging, self.watch = version, merging, Stopwatch()
        limit = int(bucket_mb * 2**20)
        self.buckets = list(pack(tensors, limit, self._room, self.watch, lends=False))
        del self._rooms[len(self.buckets) :]
        self.tensors = {name: tensor for each in self.buckets for name, tensor in each.tensors()}
        self.hashes = {name: value for each in self.buckets for name, _, _, value in each.facts}

    def _room(self, number: int, num_bytes: int) -> Tensor:
        """The memory of a bucket, used again where it is large enough."""
        if number == len(self._rooms):
            self._rooms.append(new_room(num_bytes))
        elif len(self._rooms[number]) < num_bytes:
            self._rooms[number] = new_room(num_bytes)
        return self._rooms[number][:num_bytes]

    def effective(self) -> Iterable[tuple[str, Tensor]]:
        """The weights as a rollout has them in the end."""
        if self.merging is None:
            return self.tensors.items()
        return effective_tensors(self.tensors, self.merging)


class Snapshots:
    """The newest version, and those that deliveries still read.

    The one before the newest gives its memory to the next, unless it is being read then: so there
    are two, and one more for each older version that a delivery is slow to send.
    """

    def __init__(self) -> None:
        self.newest: Snapshot | None = None
        self.held: dict[str, Snapshot] = {}
        """By the address of a delivery, what it sends."""
        self._spare = Snapshot()
        self._lock = threading.Lock()

    def publish(
        self,
        version: int,
        tensors: NamedTensors,
        bucket_mb: float,
        merging: dict[str, Any] | None = None,
    ) -> PublishReport:
        """Copy the weights as `version`.

        The share of tensors that the version before had not is None where there was none before, or
        the version is the same and its weights are others.
        """
        before = self.newest
        with self._lock:
            is_free = all(self._spare is not read for read in list(self.held.values()))
            made = self._spare if is_free else Snapshot()
        made.fill(version, tensors, bucket_mb, merging)
        with self._lock:
            self._spare, self.newest = before or Snapshot(), made
        num_bytes = sum(bucket.num_bytes for bucket in made.buckets)
        share = None
        if before is not None and before.version != version:
            changed = [name for name in made.hashes if made.hashes[name] != before.hashes.get(name)]
            share = len(changed) / max(1, len(made.hashes))
        return PublishReport(num_bytes, made.watch.seconds, share)

    def hold(self, version: int | None, address: str) -> Snapshot:
        """The snapshot of this version, or the newest; it stays as it is while it is in `held`."""
        with self._lock:
            newest = None if self.newest is None else self.newest.version
            if self.newest is None or version not in (newest, None):
                is_held = "none is held" if newest is None else f"the one that is held is {newest}"
                raise WeightSyncError(
                    f"version {version} is not there to be delivered: {is_held}. "
                    "actor.publish_weights(version) makes one, in the place of the one before."
                )
            self.held[address] = self.newest
            return self.newest

    @contextmanager
    def reading(self, version: int | None = None) -> Iterator[Snapshot]:
        """Within, the snapshot of this version, or the newest, stays as it is."""
        reader = f"reader {new_secret()}"
        snapshot = self.hold(version, reader)
        try:
            yield snapshot
        finally:
            del self.held[reader]
