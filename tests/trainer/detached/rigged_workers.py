"""Workers that are slow, or die, at a moment that a test chooses."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.waiting import wait_until
from trainer.ppo.config import PPOConfig
from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl_like.process.worker import Worker
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
    """Maker 0's last rank is killed in its second generation; what comes in its place is not."""

    num_calls = 0

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(MESH), readonly=True)
    def generate_sequences(self, data: DataProto) -> DataProto:
        self.num_calls += 1
        has_died = Path(self._whole_config.trainer.default_local_dir, "has_died")
        is_it = self.role == "rollout" and self.rank == self.world_size - 1
        if is_it and self.num_calls == 2 and not has_died.exists():
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


def note_uids(worker: Worker, folder: str, data: DataProto) -> None:
    """A line for every call: the uids that this rank was given."""
    with Path(folder, f"uids_of_{worker.role}_{worker.rank}.jsonl").open("a") as file:
        file.write(json.dumps(data.non_tensor_batch["uid"].tolist()) + "\n")


class NotingRollout(RolloutWorker):
    """Notes which prompts it answers; none goes on with its first ones before all three have."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False)
    def generate_sequences(self, data: DataProto) -> DataProto:
        folder = self._whole_config.trainer.default_local_dir
        note_uids(self, folder, data)
        wait_until(lambda: len(list(Path(folder).glob("uids_of_rollout*"))) == 3)
        return super().generate_sequences(data)


class NotingActor(ActorWorker):
    """Notes which samples each rank learns from."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.folder = config.trainer.default_local_dir

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, float]:
        note_uids(self, self.folder, data)
        return super().update_actor(data, ptx)


class WaitsForWeights(RolloutWorker):
    """From the second generation on it stands at the fourth token until newer weights are here."""

    num_calls = 0

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(MESH), readonly=True)
    def generate_sequences(self, data: DataProto) -> DataProto:
        self.num_calls += 1
        engine, steps = self.engine, itertools.count(1)
        asked_to_stop, began_with = type(engine).asked_to_stop, engine.version

        def at_a_step() -> bool:
            if self.num_calls > 1 and next(steps) == 4:
                wait_until(lambda: asked_to_stop(engine) or engine.version != began_with)
            return asked_to_stop(engine)

        with mock.patch.object(engine, "asked_to_stop", at_a_step):
            return super().generate_sequences(data)


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
