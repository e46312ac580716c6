"""Workers that are slow, or die, at a moment that a test chooses."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from workers.roles.actor import ActorWorker
from workers.roles.rollout import MESH, RolloutWorker
from workers.weights.sync import SyncReport

GENERATION_S = 6.0
SEND_S = LEARN_S = 0.2
ROW_S, TAKE_S, UPDATE_S = 0.0075, 0.04, 0.06


class LongRollout(RolloutWorker):
    """From the second call on it generates for seconds."""

    num_calls = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, data: DataProto) -> DataProto:
        self.num_calls += 1
        if self.num_calls > 1:
            time.sleep(GENERATION_S)
        return super().generate_sequences(data)


class DiesOnce(RolloutWorker):
    """Its second rank is killed in the second generation; what comes in its place is not."""

    num_calls = 0

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(MESH), readonly=True)
    def generate_sequences(self, data: DataProto) -> DataProto:
        self.num_calls += 1
        has_died = Path(self._whole_config.trainer.default_local_dir, "has_died")
        if self.rank == 1 and self.num_calls == 2 and not has_died.exists():
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().generate_sequences(data)


class DiesAtOnce(RolloutWorker):
    """Killed in its first generation, and leaves the moment."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(MESH), readonly=True)
    def generate_sequences(self, data: DataProto) -> DataProto:
        folder = Path(self._whole_config.trainer.default_local_dir)
        folder.joinpath("killed_at").write_text(str(time.time()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)
        return super().generate_sequences(data)


class DiesAsItSends(ActorWorker):
    """Killed in the delivery of the second version."""

    num_deliveries = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def deliver_weights(self, *arguments: Any) -> SyncReport:
        self.num_deliveries += 1
        if self.num_deliveries > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().deliver_weights(*arguments)


class SlowActor(ActorWorker):
    """Takes its time to send, and to learn."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, past_queue=True)
    def deliver_weights(self, *arguments: Any) -> SyncReport:
        time.sleep(SEND_S)
        return super().deliver_weights(*arguments)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, float]:
        time.sleep(LEARN_S)
        return super().update_actor(data, ptx)


class FailsInSecondUpdate(ActorWorker):
    """As a batch does that no update can use."""

    num_updates = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, float]:
        self.num_updates += 1
        if self.num_updates > 1:
            raise ValueError(f"no gradient of this at {time.time()}")
        return super().update_actor(data, ptx)


class OtherWeights(RolloutWorker):
    """Built with weights that are not the trainers'."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        for parameter in self.engine.module.parameters():
            parameter.data.normal_()


class OtherShape(RolloutWorker):
    """Built with another number of rows in one of its weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        norm = self.engine.module.model.norm
        norm.weight = torch.nn.Parameter(torch.ones(len(norm.weight) + 1))


class CannotBeBuilt(RolloutWorker):
    """As with an engine that does not load the model."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        raise ValueError("no such engine")


class SleepingRollout(RolloutWorker):
    """As long at every row as the phases of a prediction say, and at taking weights."""

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(MESH), readonly=True)
    def generate_sequences(self, data: DataProto) -> DataProto:
        time.sleep(ROW_S * len(data))
        return super().generate_sequences(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        time.sleep(TAKE_S)
        return super().receive_weights(address, version)


class SleepingActor(ActorWorker):
    """As long at every update."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, float]:
        time.sleep(UPDATE_S)
        return super().update_actor(data, ptx)
