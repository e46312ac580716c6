"""Transfer weights from the trainer to the rollout engines: versioned, verified, two-phase.

    sync_weights(actor, rollout, version)            # actor and rollout wait until it is done
    publish_weights(actor, version)                  # between updates: a copy in host memory
    deliver_weights(actor, rollout_1, version)       # from any thread, while the actor continues
    deliver_weights(actor, rollout_2, version)       # at the same time, from another thread

A rollout in the actor's processes uses the weights by reference or copies them
(`rollout.update_weights`). Other rollouts receive them (`workers.weights.transfer`). In both cases
each rank first loads and verifies the weights (names, shapes, bytes). Then all ranks vote, and only
a unanimous vote changes the version. Otherwise the engines stay stale and do not generate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, ParamSpec

from verl_like.calls.future import gather
from verl_like.errors import VerlLikeError, WeightSyncError

logger = logging.getLogger(__name__)
P = ParamSpec("P")
GRACE_S = 3.0
"""Seconds that one side of a sync may continue after the other has failed."""


@dataclass(frozen=True)
class PublishReport:
    """The result of publishing on one rank; has default values on ranks that do not send."""

    num_bytes: int = 0
    hash_s: float = 0.0


@dataclass(frozen=True)
class SyncReport:
    """One rank's result of a sync: its error, the number of bytes, and the seconds of hashing."""

    error: str | None = None
    num_bytes: int = 0
    hash_s: float = 0.0
    voted: bool = True
    """True if the rank reached the vote: all ranks were present, and no transfer was aborted."""


class WeightsRejectedError(WeightSyncError):
    """Raised if all ranks were connected and at least one rejected the weights."""


def _retry_if_rejected(sync: Callable[P, dict[str, float]]) -> Callable[P, dict[str, float]]:
    """Let a sync run once more if a rank rejected the weights."""

    @wraps(sync)
    def attempt(*args: P.args, **kwargs: P.kwargs) -> dict[str, float]:
        try:
            return sync(*args, **kwargs)
        except WeightsRejectedError as error:
            logger.warning("%s Retrying once.", error)
            return sync(*args, **kwargs)

    return attempt


@_retry_if_rejected
def sync_weights(
    actor_group: Any,
    rollout_group: Any,
    version: int,
    bucket_mb: float = 16.0,
    as_trained: bool = False,
) -> dict[str, float]:
    """Bring the actor's weights to every rollout engine, verify them, and number them `version`.

        sync_weights(actor, rollout, version=1)

    An engine that decodes with the actor's module gets no copy. If a rank rejects the weights, they
    are sent once more.

    Args:
        actor_group: the group that trains, with initialized models.
        rollout_group: the group that generates.
        version: number of these weights; the generated samples have it.
        bucket_mb: size in MB of the buckets in which weights are sent.
        as_trained: send the dtype of training, and not that of the rollout.

    Raises:
        WeightSyncError: a rank rejected the weights twice, or is missing.
    """
    start = time.perf_counter()
    if rollout_group.shares_processes_with(actor_group):
        return _figures(rollout_group.update_weights(version), version, start)
    address, size = actor_group.open_weight_channel()[0], rollout_group.world_size
    send = partial(actor_group.send_weights.remote, address, size, bucket_mb, as_trained)
    return _figures(_transfer(actor_group, rollout_group, version, address, send), version, start)


def publish_weights(
    actor_group: Any, version: int, senders: Sequence[int] = (0,), bucket_mb: float = 16.0
) -> dict[str, float]:
    """Store the actor's weights as `version`, in host memory on the ranks `senders`."""
    start = time.perf_counter()
    absent = [rank for rank in senders if not 0 <= rank < actor_group.world_size]
    if absent or not senders:
        raise WeightSyncError(
            f"version {version} cannot be published by ranks {list(senders)}. Name at least one "
            f"of the actor's ranks, 0 to {actor_group.world_size - 1}."
        )
    reports: list[PublishReport] = actor_group.publish_weights(version, list(senders), bucket_mb)
    return {
        "timing_s/publish_weights": time.perf_counter() - start,
        "perf/published_mib": max(report.num_bytes for report in reports) / 2**20,
    }


@_retry_if_rejected
def deliver_weights(
    actor_group: Any, rollout_group: Any, version: int | None = None, sender: int = 0
) -> dict[str, float]:
    """Send the published `version` to one rollout group, and verify it; call it from any thread.

    The default version is the newest; the metric `training/weight_version` reports it. The actor
    keeps working meanwhile. The rollout group receives the weights between two of its
    calls, even if samples are in progress. If a rank rejects the weights, they are sent once more.
    Raises `WeightSyncError` with the errors of both sides if the delivery fails on any rank, and
    `WorkerDiedError` if a process of either side died.
    """
    start = time.perf_counter()
    if rollout_group.shares_processes_with(actor_group):
        raise WeightSyncError(
            "weights cannot be delivered to a rollout in the actor's own processes. Call "
            "sync_weights(actor_group, rollout_group, version), which shares or copies them "
            "within each process."
        )
    address, sent = actor_group.open_delivery.remote_on(sender, version).get()[0]
    size = rollout_group.world_size
    send = partial(actor_group.deliver_weights.remote_on, sender, address, size)
    return _figures(_transfer(actor_group, rollout_group, sent, address, send), sent, start)


def _transfer(
    actor_group: Any, rollout_group: Any, version: int, address: str, send: Callable[[], Any]
) -> list[SyncReport]:
    """Run both sides and return their reports, even with errors; raise if a side has no reports."""
    receive = partial(rollout_group.receive_weights.remote, address, version)
    give_up = partial(actor_group.give_up_sync.remote, address, rollout_group.world_size)
    sides = [_Side("receive_weights", receive, version, give_up)]
    sides.append(_Side("send_weights", send, version, give_up))
    try:
        gather(*sides, grace_s=GRACE_S)
    except WeightSyncError:
        if any(side.reports is None for side in sides):
            raise
    return [report for side in sides for report in side.reports or ()]


class _Side:
    """One side of a transfer, for `gather`, which runs `get` of each side in a thread.

    The threads are needed because a group of one rank may run its call in this process, and a
    failure must reach the other side at once.
    """

    def __init__(
        self, name: str, call: Callable[[], Any], version: int, give_up: Callable[[], Any]
    ) -> None:
        self._name, self._call, self._version, self._give_up = name, call, version, give_up
        self.reports: list[SyncReport] | None = None

    def get(self, timeout: float | None) -> None:
        """Run the call and store its reports; fail and stop the other side if a rank has not voted.

        `timeout` is not used: each call has its deadline.
        """
        try:
            future = self._call()
            self._name = str(future)
            self.reports = reports = future.get()
            if not all(report.voted for report in reports):
                _raise_errors(reports, self._version)
        except Exception:
            with suppress(VerlLikeError):  # the sender may be gone
                self._give_up().get(timeout=GRACE_S)
            raise

    def __str__(self) -> str:
        return self._name


def _figures(reports: Sequence[SyncReport], version: int, start: float) -> dict[str, float]:
    """Return the metrics of a sync that began at `start`; raise the ranks' errors, if any."""
    _raise_errors(reports, version)
    return {
        "timing_s/weight_sync": time.perf_counter() - start,
        "perf/weight_sync_hash_s": max(report.hash_s for report in reports),
        "perf/weight_sync_mib": max(report.num_bytes for report in reports) / 2**20,
        "training/weight_version": float(version),
    }


def _raise_errors(reports: Sequence[SyncReport], version: int) -> None:
    """Raise the errors of all ranks, if any, as one error."""
    errors = [report.error for report in reports if report.error]
    if errors:
        was_voted = all(report.voted for report in reports)
        kind = WeightsRejectedError if was_voted else WeightSyncError
        problems = "; ".join(error.rstrip(".") for error in errors)
        raise kind(f"version {version} was not applied: {problems}.")
