"""Weights from the trainer to the rollout engines: versioned, verified, two-phase.

`sync_weights` goes one of two ways:

    same processes     rollout.update_weights: by reference at world size 1,
                       else one full copy, tensor by tensor
    other processes    actor.open_weight_channel, then
                       actor.send_weights ‖ rollout.receive_weights

Either way a rank first loads and verifies (names, shapes, bytes), then all ranks vote, and only a
unanimous vote flips the version. Where it is not unanimous the engines stay stale: they refuse to
generate.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.calls.dispatch import Dispatch, register
from verl_like.calls.future import gather
from verl_like.errors import VerlLikeError, WeightSyncError
from verl_like.process.store import new_secret
from workers.models.lora import adapter_facts
from workers.weights.channel import Channel, pack
from workers.weights.checksum import NamedTensors, byte_view, hash_of
from workers.weights.connection import (
    Address,
    Connections,
    Manifest,
    call_in_thread,
    give_up,
    join_weight_store,
    open_weight_store,
)
from workers.weights.host_copy import HostCopy
from workers.weights.module_writer import describe_problems

logger = logging.getLogger(__name__)
ALONE_S = 3.0
"""How long one side of a sync may go on after the other has failed: it waits in vain."""
_OPENING = threading.Lock()
"""Addresses are asked for by several threads."""


@dataclass(frozen=True)
class SyncReport:
    """One rank's part of a sync: why it refused, the bytes it moved, the time of their hashes."""

    error: str | None = None
    num_bytes: int = 0
    hash_s: float = 0.0
    voted: bool = True
    """It came as far as the vote: nobody was missing, and nothing broke off."""


class WeightsRefusedError(WeightSyncError):
    """Every rank was there, and one has refused what it got."""


# ----------------------------------------------------------------------------------- in the driver


def sync_weights(
    actor_group: Any,
    rollout_group: Any,
    version: int,
    bucket_mb: float = 16.0,
    as_trained: bool = False,
) -> dict[str, float]:
    """Bring every rollout engine to the actor's weights, proven equal, as `version`.

    They travel in the rollout's type, unless they shall arrive `as_trained`. What a rank refuses is
    sent once more; then, or where a rank does not come, `WeightSyncError` is raised.
    """
    return once_more_if_refused(
        partial(_sync, actor_group, rollout_group, version, bucket_mb, as_trained)
    )


def _sync(
    actor_group: Any, rollout_group: Any, version: int, bucket_mb: float, as_trained: bool
) -> dict[str, float]:
    start = time.perf_counter()
    if rollout_group.shares_processes_with(actor_group):
        reports: list[SyncReport] = rollout_group.update_weights(version)
    else:
        address = actor_group.open_weight_channel()[0]
        receivers = rollout_group.world_size
        send = partial(actor_group.send_weights.remote, address, receivers, bucket_mb, as_trained)
        receive = partial(rollout_group.receive_weights.remote, address, version)
        give_up = partial(actor_group.give_up_sync.remote, address, receivers)
        # A group of one may run in this very thread when it is called, so the larger group comes
        # first.
        sender_first = actor_group.world_size > rollout_group.world_size
        first, last = (send, receive) if sender_first else (receive, send)
        one = Side(first(), version, give_up)
        one.wait_from_now()
        reports = reports_of_sides([one, Side(last(), version, give_up)])

    return sync_figures(reports, version, start)


def once_more_if_refused(sync: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The figures of a sync: of the second one, if the ranks have voted against the first."""
    try:
        return sync()
    except WeightsRefusedError as error:
        logger.warning("%s. They are sent once more.", error)
        return sync()


def sync_figures(reports: Sequence[SyncReport], version: int, start: float) -> dict[str, float]:
    """What a sync that began at `start` has cost; a `WeightSyncError` where a rank refused it."""
    raise_errors(reports, version)
    return {
        "timing_s/weight_sync": time.perf_counter() - start,
        "perf/weight_sync_hash_s": max(report.hash_s for report in reports),
        "perf/weight_sync_mb": max(report.num_bytes for report in reports) / 2**20,
        "training/weight_version": float(version),
    }


def raise_errors(reports: Sequence[SyncReport], version: int) -> None:
    """What the ranks have refused, or could not do, as one error."""
    errors = [report.error for report in reports if report.error]
    if errors:
        was_voted = all(report.voted for report in reports)
        kind = WeightsRefusedError if was_voted else WeightSyncError
        raise kind(f"version {version} was not taken over: " + "; ".join(errors))


class Side:
    """The call of one side of a sync, for `gather`: it fails as soon as a rank came to no vote."""

    def __init__(self, future: Any, version: int, give_up: Callable[[], object]) -> None:
        """`future` is of the reports of its ranks; `give_up` tells the other side of a failure."""
        self._future, self._version, self._give_up = future, version, give_up
        future.gives_up_soon = True
        self.reports: list[SyncReport] | None = None
        self.get: Callable[..., list[SyncReport]] = self._reports

    def wait_from_now(self) -> None:
        """In a thread, so that a failure is told while this one makes the other side's call."""
        self.get = call_in_thread(str(self), self._reports).result

    def _reports(self, timeout: float | None = None) -> list[SyncReport]:
        try:
            self.reports = reports = self._future.get(timeout)
            if not all(report.voted for report in reports):
                raise_errors(reports, self._version)
        except Exception:
            with suppress(VerlLikeError):  # the sender may be the one that is gone
                self._give_up()
            raise
        return reports

    def __str__(self) -> str:
        return str(self._future)


def reports_of_sides(sides: Sequence[Side]) -> list[SyncReport]:
    """Those of both sides, bad ones as well; an error where one side has none."""
    try:
        gather(*sides, grace_s=ALONE_S)
    except WeightSyncError:
        if any(side.reports is None for side in sides):
            raise
    return [report for side in sides for report in side.reports or ()]


# -------------------------------------------------------------------------------- in the processes


class _SendingEngine(Protocol):
    module: Any

    def named_full_tensors(
        self, on_all_ranks: bool, dtype: torch.dtype | None, merged: bool
    ) -> Iterator[tuple[str, Tensor]]: ...


class _ReceivingEngine(Protocol):
    hash_s: float

    def load_weights(
        self, tensors: NamedTensors, hashes: Mapping[str, int] | None = None
    ) -> None: ...

    def commit(self, version: int) -> None: ...


class WeightSender:
    """Mixed into the actor's worker: the sending side between processes.

    Needs `rank`, `device` and `engine`. Weights are cast to `sent_dtype`, where there is one,
    before they are hashed: what arrives is compared bit by bit, and no more travels than is kept.
    With `sends_changed` that which every receiver holds is left out, and adapters come apart from
    their base.
    """

    rank: int
    device: torch.device
    engine: _SendingEngine
    sent_dtype: torch.dtype | None = None
    sends_changed = False
    _drops_next = False
    _dropped_version: int | None = None
    _weight_store: tuple[dist.TCPStore, str] | None = None
    _num_syncs = 0

    @cached_property
    def connections(self) -> Connections:
        """To its receivers, which last from one sync to the next."""
        return Connections()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_weight_channel(self) -> str | None:
        """Rank 0 returns the address of a sync (`workers.weights.connection`)."""
        return str(self.new_address()) if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def give_up_sync(self, address: str, num_receivers: int) -> None:
        """One side of the sync at this address has failed: nobody waits for it there any longer."""
        place = Address.read(address).place
        if self._weight_store is not None and self._weight_store[1] == place:
            # a connection of its own: the other one may be the one that waits
            give_up(Address.read(address).part_of(join_weight_store(place)), num_receivers)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop_next_bucket(self) -> None:
        """The next sync from this rank loses its first bucket: a fault on purpose."""
        self._drops_next = True

    def is_to_drop(self, version: int | None = None) -> bool:
        """Whether the sync that begins is that one. A version that is known loses no second."""
        if not self._drops_next or (version is not None and version == self._dropped_version):
            return False
        self._drops_next, self._dropped_version = False, version
        return True

    def tensors_to_send(
        self, *, on_all_ranks: bool = False, as_trained: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """The full weights as a rollout gets them (a reference: `as_trained`); collective."""
        return self.engine.named_full_tensors(
            on_all_ranks=on_all_ranks,
            dtype=None if as_trained else self.sent_dtype,
            merged=as_trained or not self.sends_changed,
        )

    def merging(self) -> dict[str, Any] | None:
        """How the receivers of changes put base and adapters together."""
        if not self.sends_changed:
            return None
        dtype = None if self.sent_dtype is None else str(self.sent_dtype)
        return {"adapters": adapter_facts(self.engine.module), "dtype": dtype}

    def new_address(self) -> Address:
        """A part of this rank's one store that nobody else has been given, with its own secret."""
        with _OPENING:
            self._weight_store = self._weight_store or open_weight_store()
            self._num_syncs += 1
            return Address(self._weight_store[1], self._num_syncs, new_secret())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(
        self, address: str, num_receivers: int, bucket_mb: float, as_trained: bool = False
    ) -> SyncReport:
        """Gather tensor by tensor on all actor ranks; rank 0 sends them to all rollout ranks."""
        tensors = self.tensors_to_send(as_trained=as_trained)
        limit = int(bucket_mb * 2**20)
        merging = None if as_trained else self.merging()

        def send(channel: Channel) -> None:
            drops = self.is_to_drop()
            if merging is None:
                channel.send(pack(tensors, limit, channel.room, channel.watch), drops_first=drops)
            else:
                send_changes(channel, tensors, limit, merging, drops_first=drops)

        try:
            if self.rank != 0:
                return SyncReport()
            return self.send_through(address, num_receivers, self.device, send)
        finally:
            # The other actor ranks are in the same collectives: go through them to the end.
            deque(tensors, maxlen=0)

    def send_through(
        self,
        text: str,
        num_receivers: int,
        device: torch.device,
        send: Callable[[Channel], None],
    ) -> SyncReport:
        """Meet the receivers, `send` to them and vote."""
        address = Address.read(text)
        links = self.connections
        try:
            with (
                links.store(address) as store,
                links.sending(address, store, num_receivers, device) as connection,
            ):
                channel = Channel(connection, store, 0, device)
                send(channel)
                agreed = channel.all_agree(True)
                if not agreed:
                    connection.held = {}
                store.delete_all()
        except WeightSyncError as error:
            return SyncReport(f"actor rank {self.rank}: {error}", voted=False)
        problem = None if agreed else "a rollout rank refused the weights"
        return SyncReport(problem, channel.num_bytes, channel.watch.seconds)


def send_changes(
    channel: Channel,
    tensors: NamedTensors,
    limit: int,
    merging: Mapping[str, Any],
    drops_first: bool = False,
) -> None:
    """Send what the receivers do not hold; in the end the manifest of the whole."""
    whole: Manifest = {}
    held = channel.connection.held

    def changed() -> Iterator[tuple[str, Tensor]]:
        for name, own in tensors:
            tensor = own.detach().to(channel.device).contiguous()
            with channel.watch.running():
                value = hash_of(byte_view(tensor))
            whole[name] = [str(tensor.dtype), list(tensor.shape), value]
            if held.get(name) != whole[name]:
                yield name, tensor

    def summary() -> dict[str, Any]:
        return {"manifest": whole, "merging": merging}

    channel.send(pack(changed(), limit, channel.room, channel.watch), summary, drops_first)
    channel.connection.held = whole


class WeightReceiver:
    """Mixed into the rollout's worker: the receiving side.

    Needs `rank`, `world_size`, `device`, `engine`; `copy` holds what was sent beside the engine.
    """

    rank: int
    world_size: int
    device: torch.device
    engine: _ReceivingEngine
    copy: HostCopy | None = None

    @cached_property
    def connections(self) -> Connections:
        """To its sender, which last from one sync to the next."""
        return Connections()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        """Load what the actor sends; the version flips if every rank has verified its copy."""
        return self._receive(address, self._load, lambda: self.engine.commit(version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def receive_ahead(self, address: str, version: int) -> SyncReport:
        """Keep what the actor sends, verified, while the engine generates with what it has."""
        copy = self.own_copy()

        def done() -> None:
            copy.version = version

        return self._receive(address, self._keep, done)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_received(self, version: int) -> SyncReport:
        """Load the version that was received ahead; it flips if every rank has loaded it."""
        copy, error = self.own_copy(), None
        with copy.lock:
            problems = [f"holds version {copy.version}, not {version}"]
            if copy.version == version:
                problems = self._load_copy()
            if problems:
                error = f"rollout rank {self.rank}: {' '.join(problems)}"
            self.commit_if_all_loaded(version, error)
        return SyncReport(error, hash_s=self.engine.hash_s)

    def commit_if_all_loaded(self, version: int, error: str | None) -> None:
        """The ranks vote; the version counts if none has an error."""
        votes = torch.tensor([0 if error is None else 1])
        if self.world_size > 1:
            dist.all_reduce(votes)
        if int(votes) == 0:
            self.engine.commit(version)

    def own_copy(self) -> HostCopy:
        """Where weights wait for their engine."""
        if self.copy is None:
            raise WeightSyncError(
                "this rollout keeps no copy of its weights, so it cannot receive them ahead: set "
                "actor_rollout_ref.rollout.double_buffer=true."
            )
        return self.copy

    def _receive(
        self, text: str, take: Callable[[Channel], list[str]], done: Callable[[], None]
    ) -> SyncReport:
        """What the actor sends to this address: `take` gives what is wrong with it, in words.

        `done` is called where no rank has anything to say.
        """
        problems: list[str] = []
        try:
            with (
                self.copy.lock if self.copy is not None else nullcontext(),
                self._channel(Address.read(text)) as channel,
            ):
                problems += take(channel)
                if channel.all_agree(not problems):
                    done()
        except WeightSyncError as problem:
            words = " ".join(problems) or problem
            return SyncReport(f"rollout rank {self.rank}: {words}", voted=False)

        error = f"rollout rank {self.rank}: {' '.join(problems)}" if problems else None
        hash_s = channel.watch.seconds + self.engine.hash_s
        return SyncReport(error, channel.num_bytes, hash_s)

    @contextmanager
    def _channel(self, address: Address) -> Iterator[Channel]:
        links, name = self.connections, str(getattr(self, "role", ""))
        who = self.rank + 1, self.world_size
        with (
            links.store(address) as store,
            links.receiving(address, store, *who, self.device, name) as connection,
        ):
            yield Channel(connection, store, self.rank + 1, self.device)

    def _keep(self, channel: Channel) -> list[str]:
        """Copy what arrives; what is wrong with it, in words."""
        try:
            self.own_copy().take(channel)
        except WeightSyncError as problem:
            return [str(problem)]
        return []

    def _load_copy(self) -> list[str]:
        """Load what is held beside the engine; what is wrong with it, in words."""
        try:
            self.engine.load_weights(self.own_copy().effective(self.device))
        except WeightSyncError as problem:
            return [str(problem)]
        return []

    def _load(self, channel: Channel) -> list[str]:
        """Load what arrives; what is wrong with it, in words."""
        arriving, hashes = channel.receive(), channel.hashes
        if self.copy is not None:
            arriving, hashes = self._taken(self.copy, channel), {}
        problems: list[str] = []
        try:
            self.engine.load_weights(arriving, hashes)
        except WeightSyncError as problem:
            problems.append(str(problem))
            deque(arriving, maxlen=0)  # what is still coming, ahead of the vote
        if self.copy is not None:
            return problems
        if channel.summary:
            channel.corrupt.append(
                "the whole: the actor sends what has changed (actor_rollout_ref.rollout.sync="
                "changed), and this rollout keeps no copy to put it to; configure them alike"
            )
        if channel.corrupt:
            problems.append(describe_problems("transfer", corrupt=channel.corrupt))
        return problems

    def _taken(self, copy: HostCopy, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        copy.take(channel)
        yield from copy.effective(self.device)
