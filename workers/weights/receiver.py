"""Receive weights in a rollout's worker, or in a frozen role that follows a trained one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from verl_like.calls.dispatch import Dispatch, register
from verl_like.errors import WeightSyncError
from workers.weights.channel import Channel, SyncReport
from workers.weights.checksum import NamedTensors
from workers.weights.module_writer import describe_problems

if TYPE_CHECKING:
    from workers.weights.connection import Connections
    from workers.weights.host_copy import HostCopy


class _ReceivingEngine(Protocol):
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
                    problems.append(describe_problems("transfer", corrupt=channel.corrupt))
                if channel.all_agree(not problems):
                    self.engine.commit(version)
        except WeightSyncError as problem:
            words = " ".join(problems) or problem
            return SyncReport(f"{self.role} rank {self.rank}: {words}", voted=False)

        error = f"{self.role} rank {self.rank}: {' '.join(problems)}" if problems else None
        return SyncReport(error, channel.num_bytes, channel.watch.seconds)

    def _taken(self, copy: HostCopy, channel: Channel) -> Iterator[tuple[str, Tensor]]:
        copy.take(channel)
        yield from copy.effective(self.device)
