"""A sender whose weights lose a bucket on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from verl_like.calls.dispatch import Dispatch, register
from workers.roles.actor import ActorWorker
from workers.weights.channel import Bucket, Channel
from workers.weights.sync import SyncReport
from workers.weights.transfer import WeightSender


class LossyChannel(Channel):
    """A channel that loses the first bucket."""

    def _start_bucket(self, number: int, bucket: Bucket) -> list[dist.Work]:
        return super()._start_bucket(number, bucket) if number else []


class LossySender(WeightSender):
    """Loses the first bucket of the first weights that are sent after `drop_next_bucket`."""

    drops_next = False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def drop_next_bucket(self) -> None:
        self.drops_next = True

    def _send_through(
        self, address: str, num_receivers: int, device: Any, send: Callable[[Channel], None]
    ) -> SyncReport:
        def send_lossy(channel: Channel) -> None:
            if self.drops_next:
                self.drops_next, channel.__class__ = False, LossyChannel
            send(channel)

        return super()._send_through(address, num_receivers, device, send_lossy)


class LossyActor(LossySender, ActorWorker):
    """An actor whose weights lose a bucket on the way to the rollout."""
