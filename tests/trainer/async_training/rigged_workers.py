"""Workers that are slow, or die, at a moment that a test chooses."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from tests.waiting import wait_until
from trainer.ppo.config import PPOConfig
from verl_like.batch.protocol import DataProto
from verl_like.calls.dispatch import Dispatch, register
from verl_like.process.worker import Worker
from workers.roles.actor import ActorWorker
from workers.roles.rollout import SUBMIT_DISPATCH, RolloutWorker
from workers.weights.sync import SyncReport

GENERATION_S = 6.0
SEND_S = LEARN_S = 0.2
PART_S = 0.02
PART_TOKENS = 3  # fewer than a turn has, so that no trajectory ends within one part


class LongRollout(RolloutWorker):
    """Generates for `GENERATION_S` in every call of `collect` after the first."""

    num_calls = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def collect(self, max_tokens: int | None = None, seconds: float | None = None) -> Any:
        self.num_calls += 1
        if self.num_calls > 1:
            time.sleep(GENERATION_S)
        return super().collect(max_tokens, seconds)


class DiesOnce(RolloutWorker):
    """Generator 0's last rank is killed in its second chunk; its replacement is not."""

    num_calls = 0

    @register(dispatch_mode=SUBMIT_DISPATCH, readonly=True, blocking=False)
    def submit(self, data: DataProto) -> None:
        self.num_calls += 1
        has_died = Path(self._run_config.trainer.default_local_dir, "has_died")
        is_it = self.role == "rollout" and self.rank == self.world_size - 1
        if is_it and self.num_calls == 2 and not has_died.exists():
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        super().submit(data)


class DiesAtOnce(RolloutWorker):
    """Is killed in its first chunk, whose time it writes to a file."""

    @register(dispatch_mode=SUBMIT_DISPATCH, readonly=True, blocking=False)
    def submit(self, data: DataProto) -> None:
        folder = Path(self._run_config.trainer.default_local_dir)
        folder.joinpath("killed_at").write_text(str(time.time()), encoding="utf-8")
        os.kill(os.getpid(), signal.SIGKILL)


class DiesAsItSends(ActorWorker):
    """Is killed in the delivery of the second version."""

    num_deliveries = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def deliver_weights(self, *arguments: Any) -> SyncReport:
        self.num_deliveries += 1
        if self.num_deliveries > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().deliver_weights(*arguments)


class SlowActor(ActorWorker):
    """Sends and learns slowly."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def deliver_weights(self, *arguments: Any) -> SyncReport:
        time.sleep(SEND_S)
        return super().deliver_weights(*arguments)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, float]:
        time.sleep(LEARN_S)
        return super().update_actor(data, ptx)


class FailsInSecondUpdate(ActorWorker):
    """Fails as for a batch that no update can use."""

    num_updates = 0

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, float]:
        self.num_updates += 1
        if self.num_updates > 1:
            raise ValueError(f"no gradient of this at {time.time()}")
        return super().update_actor(data, ptx)


class OtherWeights(RolloutWorker):
    """Has other weights than the trainers."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        super().init_model()
        for parameter in self.engine.module.parameters():
            parameter.data.normal_()


class CannotBeBuilt(RolloutWorker):
    """Fails as an engine does that cannot load the model."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        raise ValueError("no such engine")


def note_uids(worker: Worker, folder: str, data: DataProto) -> None:
    """Write a line with this rank's uids for every call."""
    with Path(folder, f"uids_of_{worker.role}_{worker.rank}.jsonl").open("a") as file:
        file.write(json.dumps(data.non_tensor_batch["uid"].tolist()) + "\n")


class NotingRollout(RolloutWorker):
    """Records its prompts; no rollout continues before all three have got their first ones."""

    @register(dispatch_mode=SUBMIT_DISPATCH, readonly=True, blocking=False)
    def submit(self, data: DataProto) -> None:
        folder = self._run_config.trainer.default_local_dir
        note_uids(self, folder, data)
        wait_until(lambda: len(list(Path(folder).glob("uids_of_rollout*"))) == 3)
        super().submit(data)


class NotingActor(ActorWorker):
    """Records the samples that each rank learns from."""

    def __init__(self, config: PPOConfig) -> None:
        super().__init__(config)
        self.folder = config.trainer.default_local_dir

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, float]:
        note_uids(self, self.folder, data)
        return super().update_actor(data, ptx)


class WaitsForWeights(RolloutWorker):
    """From the second chunk on, generates at most four tokens with the previous weights."""

    num_chunks = 0

    @register(dispatch_mode=SUBMIT_DISPATCH, readonly=True, blocking=False)
    def submit(self, data: DataProto) -> None:
        self.num_chunks += 1
        self.began_with, self.num_takes = self.engine.version, 0
        super().submit(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def collect(self, max_tokens: int | None = None, seconds: float | None = None) -> Any:
        if self.num_chunks == 1 or self.engine.version != self.began_with:
            return super().collect(max_tokens, seconds)
        self.num_takes += 1
        if self.num_takes == 1:
            return super().collect(4)
        time.sleep(0.01)
        return None


class DiesWithTurns(RolloutWorker):
    """Is killed in its third `collect`, while trajectories are unfinished."""

    is_frozen = True
    num_takes = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def collect(self, max_tokens: int | None = None, seconds: float | None = None) -> Any:
        self.num_takes += 1
        has_died = Path(self._run_config.trainer.default_local_dir, "has_died")
        if self.num_takes == 3 and self.players.num_running and not has_died.exists():
            has_died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().collect(PART_TOKENS, min(seconds or PART_S, PART_S))
