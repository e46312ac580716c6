"""Actors that write the checkpoint of their tiny model in the background, as large ones do."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from verl_like import Dispatch, register
from verl_like.errors import CheckpointError
from workers.roles.actor import ActorWorker
from workers.training.checkpoints.background_copies import Files

LIMIT_S = 60.0


class BackgroundActor(ActorWorker):
    """Writes all its shards later."""

    background_from_bytes = 0

    @property
    def step_folder(self) -> Path:
        """Return the unfinished `global_step_N.part` that is being written."""
        assert self._own_copies is not None
        return self._own_copies.folder.parent


class HeldBackActor(BackgroundActor):
    """Writes the checkpoint of step 4 after step 5."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def write_checkpoint(self) -> Files:
        metrics, until = self.step_folder.parent / "metrics.jsonl", time.monotonic() + LIMIT_S
        while self.step_folder.name == "global_step_4.part" and time.monotonic() < until:
            if metrics.read_bytes().count(b"\n") >= 5:
                break
            time.sleep(0.01)
        return super().write_checkpoint()


class KilledActor(BackgroundActor):
    """Kills the driver's process with step 2 half written, and with step 4 not committed."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def write_checkpoint(self) -> Files:
        name, files = self.step_folder.name, super().write_checkpoint()
        killed = self.step_folder.parent / f"killed_at_{name}"
        if not killed.exists() and name != "global_step_6.part":
            killed.touch()
            if name == "global_step_2.part":
                shard = self.step_folder / "actor" / "shards" / "0.safetensors"
                os.truncate(shard, shard.stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return files


class FailingActor(BackgroundActor):
    """Has no disk space for the checkpoint of step 4."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def write_checkpoint(self) -> Files:
        if self.step_folder.name == "global_step_4.part":
            raise CheckpointError(f"rank {self.rank}: {self.step_folder}: no space left")
        return super().write_checkpoint()
