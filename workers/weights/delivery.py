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
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import WeightSyncError
from verl_like.process.store import SignedStore
from workers.weights.address import Address, join_weight_store
from workers.weights.channel import Channel
from workers.weights.checksum import Hashing, checksum_of
from workers.weights.kept import changes
from workers.weights.sides import InAThread, Side, SyncReport, reports_of_sides
from workers.weights.snapshot import Snapshot, Snapshots
from workers.weights.sync import WeightSender, once_more_if_refused, sync_figures

logger = logging.getLogger(__name__)
HOST = torch.device("cpu")


@dataclass(frozen=True)
class PublishReport:
    """What one rank has published: nothing, if it was not asked to send.

    `changed_share` is that of the tensors that are not as in the version before, if there was one.
    """

    num_bytes: int = 0
    hash_s: float = 0.0
    changed_share: float | None = None


def publish_weights(
    actor_group: Any, version: int, senders: Sequence[int] = (0,)
) -> dict[str, float]:
    """Keep the actor's weights as `version` in the host memory of the ranks that send them."""
    start = time.perf_counter()
    absent = [rank for rank in senders if not 0 <= rank < actor_group.world_size]
    if absent or not senders:
        raise WeightSyncError(
            f"version {version} cannot be published by ranks {list(senders)}: the actor has ranks "
            f"0 to {actor_group.world_size - 1}, and one of them at least must send."
        )
    reports: list[PublishReport] = actor_group.publish_weights(version, list(senders))
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
    bucket_mb: float = 16.0,
    sender: int = 0,
    ahead: bool = False,
    at_once: bool = False,
) -> dict[str, float]:
    """Bring one rollout group to the published `version`, proven equal; call it from any thread.

    Without a version to the newest; `training/weight_version` says which one it was.

    The actor goes on with whatever it computes. The group takes the weights when it has ended the
    calls before, and its next ones wait; `at_once` it takes them in the middle of a generation.
    With `ahead` it keeps them beside its engine, which goes on too, until `load_delivered`; to one
    group the two are called one after the other. What a rank refuses is sent once more. Raises
    `WeightSyncError` where it fails on any rank, with what both sides say, and `WorkerDiedError`
    where a rank of either side is gone.
    """
    how = bucket_mb, sender, ahead, at_once
    return once_more_if_refused(partial(_deliver, actor_group, rollout_group, version, *how))


def _deliver(
    actor_group: Any,
    rollout_group: Any,
    version: int | None,
    bucket_mb: float,
    sender: int,
    ahead: bool,
    at_once: bool,
) -> dict[str, float]:
    start = time.perf_counter()
    if rollout_group.shares_processes_with(actor_group):
        raise WeightSyncError(
            "weights cannot be delivered to a rollout in the actor's own processes: "
            "sync_weights(actor_group, rollout_group, version) hands it over."
        )
    receive = rollout_group.receive_ahead if ahead else rollout_group.receive_weights
    if at_once:
        receive = rollout_group.receive_weights_now
    address, version = actor_group.open_delivery(version, sender)[sender]

    # either group may run in the thread that calls it, so each side has one
    what = address, rollout_group.world_size, bucket_mb, sender
    sending = InAThread(f"actor rank {sender}", actor_group.deliver_weights, *what)
    received = receive.remote(address, version)
    give_up = partial(actor_group.give_up_sync.remote, address, rollout_group.world_size)
    sides = [Side(future, int(version), give_up) for future in (received, sending)]
    reports = reports_of_sides(sides)
    return sync_figures(reports, int(version), start)


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


class WeightPublisher(WeightSender):
    """Mixed into the actor's worker: snapshots of its weights, and their delivery beside its work.

    Deliveries come in threads of their own. Each has a connection of its own to the store, since
    whoever waits on one holds up all others on it.
    """

    _snapshots: Snapshots | None = None
    _deliveries: dict[str, Snapshot]
    _idle_stores: deque[dist.TCPStore]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(self, version: int, senders: Sequence[int] = (0,)) -> PublishReport:
        """Copy the full weights, in the type that a rollout gets them in, on these ranks.

        The newest version alone is kept; one that is being delivered stays until that has ended.
        """
        tensors = self.tensors_to_send(on_all_ranks=list(senders) != [0])
        hashing = Hashing()
        try:
            if self.rank not in senders:
                return PublishReport()
            self._prepare()
            assert self._snapshots is not None, "made a line above"
            share = self._snapshots.publish(version, tensors, hashing, self.merging())
        finally:
            # The other actor ranks are in the same collectives: go through them to the end.
            deque(tensors, maxlen=0)
        with self._snapshots.reading(version) as snapshot:
            return PublishReport(snapshot.num_bytes, hashing.seconds, share)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def published_checksum(self, version: int) -> str | None:
        """Hash of a published version, comparable with a rollout's `weights_checksum`."""
        if self._snapshots is None:
            return None
        with self._snapshots.reading(version) as snapshot:
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
        if self._snapshots is None:
            raise WeightSyncError(
                f"actor rank {self.rank} has published no version of its weights, so none can be "
                f"delivered from it: actor.publish_weights(version, senders=[{self.rank}])."
            )
        snapshot = self._snapshots.begin_reading(version)
        address = str(self._new_address())
        self._deliveries[address] = snapshot
        return address, snapshot.version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def deliver_weights(
        self, address: str, num_receivers: int, bucket_mb: float, sender: int = 0
    ) -> SyncReport:
        """Send the version that was held for this address to the ranks that come to it."""
        if self.rank != sender:
            return SyncReport()
        assert self._snapshots is not None, "whoever has an address has published"
        snapshot = self._deliveries.pop(address)
        try:
            with (
                self._own_store(address) as store,
                closing(Channel(store, 0, num_receivers, HOST)) as channel,
            ):
                what = changes(store, num_receivers, snapshot.merging)
                channel.drops_first = self.is_to_drop(snapshot.version)
                if what is None:
                    channel.send_buckets(snapshot.buckets(int(bucket_mb * 2**20)))
                else:
                    channel.send(snapshot.tensors.items(), bucket_mb, snapshot.hashes, what)
                agreed = channel.all_agree(True)
        except WeightSyncError as error:
            self.parts.failed(Address.read(address))
            return SyncReport(f"actor rank {self.rank}: {error}", voted=False)
        finally:
            self._snapshots.end_reading(snapshot)
        problem = None if agreed else "a rollout rank refused the weights"
        return SyncReport(problem, channel.num_bytes, channel.hashing.seconds)

    def _prepare(self) -> None:
        """Before the first publication: what deliveries need.

        Their store is opened here, where the environment is that of this role's calls.
        """
        if self._snapshots is None:
            self._opened_store()
            self._deliveries, self._idle_stores = {}, deque()
            self._snapshots = Snapshots()

    @contextmanager
    def _own_store(self, text: str) -> Iterator[SignedStore]:
        """The store of one delivery, over a connection that no other one uses meanwhile."""
        address = Address.read(text)
        try:
            connection = self._idle_stores.pop()
        except IndexError:
            connection = join_weight_store(address.place)
        yield address.part_of(connection)
        self.parts.delete(address, connection)
        self._idle_stores.append(connection)  # after an error it may be broken, and is let go
