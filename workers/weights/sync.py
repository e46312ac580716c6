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
from contextlib import closing, nullcontext
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import WeightSyncError
from verl_like.process.store import SignedStore, new_secret
from workers.models.lora import adapter_facts
from workers.weights.address import Address, StoreParts, join_weight_store, open_weight_store
from workers.weights.channel import Channel
from workers.weights.checksum import NamedTensors, Seen
from workers.weights.kept import KeptWeights, announce, changes
from workers.weights.meeting import give_up
from workers.weights.sides import (
    Side,
    SyncReport,
    WeightsRefusedError,
    raise_errors,
    reports_of_sides,
)
from workers.weights.sink import describe_problems

logger = logging.getLogger(__name__)
_OPENING = threading.Lock()
"""Addresses are asked for by several threads."""


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
        receive = partial(rollout_group.receive_weights.remote, address, version)
        send = partial(actor_group.send_weights.remote, rollout_group.world_size, bucket_mb)
        if as_trained:
            send = partial(send, as_trained=True)
        give_up = partial(actor_group.give_up_sync.remote, address, rollout_group.world_size)
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


class _SendingEngine(Protocol):
    module: Any

    def named_full_tensors(
        self, on_all_ranks: bool, dtype: torch.dtype | None, merged: bool
    ) -> Iterator[tuple[str, Tensor]]: ...


class _ReceivingEngine(Protocol):
    hash_s: float

    def load_weights(
        self, tensors: NamedTensors, seen: Mapping[str, Seen] | None = None
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
    _num_channels = 0
    _next_sync: Address | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_weight_channel(self) -> str | None:
        """Rank 0 returns the address of the next sync (`workers.weights.address`)."""
        if self.rank != 0:
            return None
        self._next_sync = self._new_address()
        return str(self._next_sync)

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

    @cached_property
    def parts(self) -> StoreParts:
        """What syncs leave in the store of this rank."""
        return StoreParts()

    def _new_address(self) -> Address:
        """A part of this rank's one store that nobody else has been given, with its own secret."""
        with _OPENING:
            self._num_channels += 1
            return Address(self._opened_store()[1], self._num_channels, new_secret())

    def _opened_store(self) -> tuple[dist.TCPStore, str]:
        self._weight_store = self._weight_store or open_weight_store()
        return self._weight_store

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(
        self, num_receivers: int, bucket_mb: float, as_trained: bool = False
    ) -> SyncReport:
        """Gather tensor by tensor on all actor ranks; rank 0 sends them to all rollout ranks."""
        tensors = self.tensors_to_send(as_trained=as_trained)
        try:
            if self.rank != 0:
                return SyncReport()
            assert self._next_sync is not None, "open_weight_channel comes first"
            store = self._next_sync.part_of(self._opened_store()[0])
            with closing(Channel(store, 0, num_receivers, self.device)) as channel:
                merging = None if as_trained else self.merging()
                channel.drops_first = self.is_to_drop()
                channel.send(tensors, bucket_mb, None, changes(store, num_receivers, merging))
                agreed = channel.all_agree(True)
            self.parts.delete(self._next_sync, self._opened_store()[0])
        except WeightSyncError as error:
            self.parts.failed(self._next_sync)
            return SyncReport(f"actor rank {self.rank}: {error}", voted=False)
        finally:
            # The other actor ranks are in the same collectives: go through them to the end.
            deque(tensors, maxlen=0)
        problem = None if agreed else "a rollout rank refused the weights"
        return SyncReport(problem, channel.num_bytes, channel.hashing.seconds)


class WeightReceiver:
    """Mixed into the rollout's worker: the receiving side.

    Needs `rank`, `world_size`, `device`, `engine`; `kept` holds what was sent beside the engine.
    """

    rank: int
    world_size: int
    device: torch.device
    engine: _ReceivingEngine
    kept: KeptWeights | None = None
    _joined_store: tuple[dist.TCPStore, str] | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        """Load what the actor sends; the version flips if every rank has verified its copy."""
        return self._receive(address, self._load, lambda: self.engine.commit(version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def receive_ahead(self, address: str, version: int) -> SyncReport:
        """Keep what the actor sends, verified, while the engine generates with what it has."""
        kept = self.kept_copy()

        def done() -> None:
            kept.version = version

        return self._receive(address, self._keep, done)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_received(self, version: int) -> SyncReport:
        """Load the version that was received ahead; it flips if every rank has loaded it."""
        kept, error = self.kept_copy(), None
        with kept.lock:
            try:
                if kept.version != version:
                    raise WeightSyncError(f"holds version {kept.version}, not {version}")
                self.engine.load_weights(kept.effective())
            except WeightSyncError as problem:
                error = f"rollout rank {self.rank}: {problem}"
            self.commit_if_all_loaded(version, error)
        return SyncReport(error, hash_s=self.engine.hash_s)

    def commit_if_all_loaded(self, version: int, error: str | None) -> None:
        """The ranks vote; the version counts if none has an error."""
        votes = torch.tensor([0 if error is None else 1])
        if self.world_size > 1:
            dist.all_reduce(votes)
        if int(votes) == 0:
            self.engine.commit(version)

    def kept_copy(self) -> KeptWeights:
        """Where weights wait for their engine."""
        if self.kept is None:
            raise WeightSyncError(
                "this rollout keeps no copy of its weights, so it cannot receive them ahead: set "
                "actor_rollout_ref.rollout.double_buffer=true."
            )
        return self.kept

    def _receive(
        self, address: str, take: Callable[[Channel], list[str]], done: Callable[[], None]
    ) -> SyncReport:
        """What the actor sends to this address: `take` gives what is wrong with it, in words.

        `done` is called where no rank has anything to say.
        """
        problems: list[str] = []
        try:
            with self.kept.lock if self.kept is not None else nullcontext():
                store = self._store_of(Address.read(address))
                if self.kept is not None and self.kept.announces:
                    announce(store, self.rank + 1, self.kept.manifest)
                own = Channel(store, self.rank + 1, self.world_size, self.device)
                with closing(own) as channel:
                    problems += take(channel)
                    if channel.all_agree(not problems):
                        done()
        except WeightSyncError as problem:
            self._joined_store = None
            words = " ".join(problems) or problem
            return SyncReport(f"rollout rank {self.rank}: {words}", voted=False)

        error = f"rollout rank {self.rank}: {' '.join(problems)}" if problems else None
        hash_s = channel.hashing.seconds + self.engine.hash_s
        return SyncReport(error, channel.num_bytes, hash_s)

    def _keep(self, channel: Channel) -> list[str]:
        """Keep what arrives; what is wrong with it, in words."""
        try:
            self.kept_copy().take(channel, channel.receive())
        except WeightSyncError as problem:
            return [str(problem)]
        return []

    def _load(self, channel: Channel) -> list[str]:
        """Load what arrives; what is wrong with it, in words."""
        arriving = channel.receive()
        problems: list[str] = []
        try:
            if self.kept is None:
                self.engine.load_weights(arriving, channel.seen)
            else:
                self.engine.load_weights(self.kept.taken(channel, arriving))
        except WeightSyncError as problem:
            problems.append(str(problem))
            deque(arriving, maxlen=0)  # what is still coming, ahead of the vote
        if channel.corrupt and self.kept is None:
            problems.append(describe_problems("transfer", corrupt=channel.corrupt))
        return problems

    def _store_of(self, address: Address) -> SignedStore:
        """The sync's part of the sender's store, which is joined once.

        Torch asks for the name of every peer, which a slow resolver makes long.
        """
        place = address.place
        if self._joined_store is None or self._joined_store[1] != place:
            self._joined_store = join_weight_store(place), place
        return address.part_of(self._joined_store[0])
