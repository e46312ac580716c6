"""Workers that are killed during a weight sync, when a file of the run folder says so."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from trainer.ppo.config import PPOConfig
from verl_like.calls.dispatch import Dispatch, register
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.weights import connection
from workers.weights.channel import Channel
from workers.weights.sync import SyncReport

ORDER = "kill_in_sync"
"""The file: "<role> <rank> <place>"."""
PLACES = ("call", "groups", "bucket", "vote", "report")


@contextmanager
def dying(worker: Any) -> Iterator[None]:
    """End the process inside the block if it is its turn.

    That is before it joins, while the groups form, with some of the weights, with all of them, or
    with the new version before it is reported.
    """
    order = Path(worker.folder, ORDER)
    role, rank, place = order.read_text().split() if order.exists() else ("", "0", "")
    if (worker.role, worker.rank) != (role, int(rank)):
        yield
        return

    def die(*_: Any) -> Any:
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)

    start_broadcast, payloads = Channel._start_broadcast, []

    def start_one_payload(channel: Channel, tensor: Tensor, *group: Any) -> Any:
        if group:  # headers use the default group
            payloads.append(tensor)
        return start_broadcast(channel, tensor, *group) if len(payloads) < 2 else die()

    if place == "call":
        die()
    with pytest.MonkeyPatch.context() as patch:
        if place == "groups":
            patch.setattr(connection, "form_groups", die)
        if place == "bucket":
            patch.setattr(Channel, "_start_broadcast", start_one_payload)
        if place == "vote":
            patch.setattr(Channel, "all_agree", die)
        yield
        die()


class Receiver(RolloutWorker):
    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.folder = config.trainer.default_local_dir

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        with dying(self):
            return super().receive_weights(address, version)


class Sender(ActorWorker):
    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.folder = config.trainer.default_local_dir

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def send_weights(self, *arguments: Any, **more: Any) -> SyncReport:
        with dying(self):
            return super().send_weights(*arguments, **more)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def deliver_weights(self, *arguments: Any) -> SyncReport:
        with dying(self):
            return super().deliver_weights(*arguments)
