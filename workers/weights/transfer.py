"""Send weights from the worker of the actor or critic, and receive them in another role's worker.

A sync sends the current weights, which all ranks gather tensor by tensor. Published weights are a
copy in host memory. Threads deliver this copy to any number of rollouts while the worker continues:
over gloo between host memories, or over NCCL if every rank has its own GPU. Rollouts receive
weights, and so do frozen roles that follow a trained one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import WeightSyncError
from workers.weights.sync import PublishReport, SyncReport

if TYPE_CHECKING:
    from workers.weights.channel import Channel
    from workers.weights.connection import Connections
    from workers.weights.full_weights import NamedTensors
    from workers.weights.host_copy import HostCopy, SentTensors, Snapshots


class _SendingEngine(Protocol):
    """The part of a training engine that a `WeightSender` reads."""

    whole_module: Any

    def named_full_tensors(
        self, on_all_ranks: bool, dtype: torch.dtype | None, merged: bool
    ) -> Iterator[tuple[str, Tensor]]: ...

    def full_trained_tensors(self) -> Iterator[tuple[str, Tensor]]: ...


class WeightSender:
    """Mixin of workers that send weights: it needs `role`, `rank`, `device` and `engine`.

    sent_dtype       weights are cast to it, if set, before they are hashed and sent
    sends_changed    only changed numbers are sent; adapters are sent apart from their base weights
    sends_adapter    only adapters are sent
    """

    role: str
    rank: int
    device: torch.device
    engine: _SendingEngine
    sent_dtype: torch.dtype | None = None
    sends_changed = False
    sends_adapter = False

    @cached_property
    def connections(self) -> Connections:
        """Connections to the receivers, reused in later syncs."""
        from workers.weights.connection import Connections

        return Connections()

    @cached_property
    def sent(self) -> SentTensors:
        """Host copies of tensors that have changed between syncs, so none of frozen weights."""
        return {}

    @cached_property
    def snapshots(self) -> Snapshots:
        """Published weights. `publish_weights` creates them, in the thread of the role's calls."""
        from workers.weights.host_copy import Snapshots

        self.connections.new_address()  # opens the store here, where the role's env variables apply
        return Snapshots(on_gpu=self.device.type == "cuda")

    @cached_property
    def delivery_stream(self) -> torch.cuda.Stream | None:
        """A stream for deliveries, so that updates on the default stream do not wait for them."""
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def open_weight_channel(self) -> str | None:
        """Return the address of a sync on rank 0 (`workers.weights.connection`), None on others."""
        return str(self.connections.new_address()) if self.rank == 0 else None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def give_up_sync(self, address: str, num_receivers: int) -> None:
        """Release all ranks that wait at this address, because one side of the sync has failed."""
        self.connections.give_up(address, num_receivers)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(
        self, address: str, num_receivers: int, bucket_mb: float, as_trained: bool = False
    ) -> SyncReport:
        """Gather the weights tensor by tensor on all ranks of this role; rank 0 sends them.

        A rollout gets weights in its own dtype. With `as_trained`, for a reference, all weights are
        sent in the dtype of training, with adapters merged.
        """
        limit = int(bucket_mb * 2**20)
        merging = None if as_trained else self._merging()
        with self._full_tensors(as_trained=as_trained) as tensors:
            if self.rank != 0:
                return SyncReport()

            def send(channel: Channel) -> None:
                if merging is None:
                    from workers.weights.channel import fill_buckets

                    channel.send(fill_buckets(tensors, limit, channel.room, channel.watch))
                else:
                    from workers.weights.host_copy import send_changes

                    send_changes(channel, tensors, limit, merging, self.sent, stores=True)

            return self._send_through(address, num_receivers, self.device, send)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(
        self, version: int, senders: Sequence[int] = (0,), bucket_mb: float = 16.0
    ) -> PublishReport:
        """Copy the weights to host memory on the ranks `senders`, in the rollout's dtype.

        Only the newest version can be delivered. A delivery in progress continues with its own
        version.
        """
        with self._full_tensors(on_all_ranks=list(senders) != [0]) as tensors:
            if self.rank not in senders:
                return PublishReport()
            return self.snapshots.publish(version, tensors, bucket_mb, self._merging())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def open_delivery(self, version: int | None = None) -> tuple[str, int | None]:
        """Reserve a published version for a delivery; return the delivery's address and version.

        The default version is the newest.
        """
        if "snapshots" not in vars(self):
            raise WeightSyncError(
                f"{self.role} rank {self.rank} has published no version of its weights, so it "
                f"cannot deliver any. Call publish_weights({self.role}_group, version, "
                f"senders=[{self.rank}])."
            )
        address = str(self.connections.new_address())
        return address, self.snapshots.hold(version, address).version

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def deliver_weights(self, address: str, num_receivers: int) -> SyncReport:
        """Send the version reserved for this address to the receivers that connect.

        If every rank has its own GPU, the weights travel from GPU to GPU. With `sends_changed`,
        the few changed bytes travel through host memory, where the earlier version is.
        """
        snapshot, previous = self.snapshots.by_address[address]
        device = self.device if snapshot.merging is None else torch.device("cpu")

        def send(channel: Channel) -> None:
            if snapshot.merging is None:
                channel.send(snapshot.buckets)
            else:
                from workers.weights.host_copy import send_changes

                limit = max((len(bucket.payload) for bucket in snapshot.buckets), default=1)
                entries = previous.manifest()
                sent = {name: (entries[name], tensor) for name, tensor in previous.tensors()}
                send_changes(channel, snapshot.tensors(), limit, snapshot.merging, sent)

        try:
            with torch.cuda.stream(self.delivery_stream):
                return self._send_through(address, num_receivers, device, send)
        finally:
            self.snapshots.release(address)

    @contextmanager
    def _full_tensors(
        self, *, on_all_ranks: bool = False, as_trained: bool = False
    ) -> Iterator[NamedTensors]:
        """Context with the full weights for a rollout, or `as_trained` for a reference.

        At its end every rank has run all collectives of the gathering, even after an error.
        """
        if self.sends_adapter and not as_trained:
            tensors = self.engine.full_trained_tensors()
        else:
            tensors = self.engine.named_full_tensors(
                on_all_ranks=on_all_ranks,
                dtype=None if as_trained else self.sent_dtype,
                merged=as_trained or not self.sends_changed,
            )
        try:
            yield tensors
        finally:
            deque(tensors, maxlen=0)

    def _merging(self) -> dict[str, Any] | None:
        """Return how receivers merge adapters into base weights; None unless `sends_changed`."""
        if not self.sends_changed:
            return None
        from workers.models.lora import adapter_layout

        dtype = None if self.sent_dtype is None else str(self.sent_dtype)
        return {"adapters": adapter_layout(self.engine.whole_module), "dtype": dtype}

    def _send_through(
        self,
        address: str,
        num_receivers: int,
        device: torch.device,
        send: Callable[[Channel], None],
    ) -> SyncReport:
        """Connect to the receivers, `send` to them and vote."""
        try:
            with self.connections.sending(address, num_receivers, device) as channel:
                send(channel)
                agreed = channel.all_agree(True)
                if not agreed:
                    channel.connection.manifest = {}
        except WeightSyncError as error:
            return SyncReport(f"{self.role} rank {self.rank}: {error}", voted=False)
        problem = None if agreed else "a receiving rank rejected the weights"
        return SyncReport(problem, channel.num_bytes, channel.watch.seconds)


class _ReceivingEngine(Protocol):
    """The part of a rollout engine that a `WeightReceiver` calls."""

    def load_weights(self, tensors: NamedTensors) -> None: ...

    def commit(self, version: int) -> None: ...


class WeightReceiver:
    """Mixin of workers that receive weights: it needs the attributes below, except `copy`.

    If the sender sends only changes, `copy` stores the received weights outside the engine.
    """

    role: str
    rank: int
    world_size: int
    device: torch.device
    engine: _ReceivingEngine
    copy: HostCopy | None = None

    @cached_property
    def connections(self) -> Connections:
        """Connections to the sender, reused in later syncs."""
        from workers.weights.connection import Connections

        return Connections()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        """Load the weights from the sender; commit the version if all ranks verified theirs."""
        problems: list[str] = []
        ranks = self.rank + 1, self.world_size
        try:
            with self.connections.receiving(address, *ranks, self.device, self.role) as channel:
                copy = self.copy
                arriving = channel.receive() if copy is None else self._taken(copy, channel)
                try:
                    self.engine.load_weights(arriving)
                except WeightSyncError as problem:
                    problems.append(str(problem))
                    deque(arriving, maxlen=0)  # receive the remaining tensors before the vote
                if copy is None and channel.summary:
                    channel.corrupt.append(
                        "the actor sends only changes "
                        "(actor_rollout_ref.rollout.weight_sync=changed), but this rollout keeps "
                        "no copy of the weights to apply changes to. Set the same "
                        "actor_rollout_ref.rollout.weight_sync for both"
                    )
                if copy is None and channel.corrupt:
                    from workers.weights.full_weights import describe_problems

                    problems.append(describe_problems("transfer", corrupt=channel.corrupt))
                if channel.all_agree(not problems):
                    self.engine.commit(version)
        except WeightSyncError as problem:
            words = " ".join(problems) or problem
            return SyncReport(f"{self.role} rank {self.rank}: {words}", voted=False)

        error = f"{self.role} rank {self.rank}: {' '.join(problems)}" if problems else None
        return SyncReport(error, channel.num_bytes, channel.watch.seconds)

    def _taken(self, copy: HostCopy, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        copy.receive(channel)
        yield from copy.effective(self.device)
