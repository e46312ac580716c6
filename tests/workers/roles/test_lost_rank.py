"""A rank that is lost during a collective is named within seconds."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.verl_like.groups import start
from tests.workers.samples import make_batch, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.calls.deadlines import Deadlines
from verl_like.errors import WorkerDiedError
from workers.config import WorkersConfig
from workers.roles.actor import ActorWorker, PolicyObjective
from workers.training.loss import LossFn


class FailingActor(ActorWorker):
    """An actor whose second rank fails in the loss of its second pass, between collectives."""

    def __init__(self, config: WorkersConfig, is_killed: bool) -> None:
        super().__init__(config)
        self.is_killed, self.num_passes = is_killed, 0

    def objective(self, data: DataProto) -> PolicyObjective:
        objective = super().objective(data)
        loss = partial(self._loss, objective.loss.compute)
        objective.loss = replace(objective.loss, compute=loss)
        return objective

    def _loss(self, compute: LossFn, *args: Any) -> Any:
        self.num_passes += 1
        if self.rank == 1 and self.num_passes == 2:
            if self.is_killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this rank has had enough")
        return compute(*args)


@pytest.mark.long
@pytest.mark.parametrize(
    ("is_killed", "error", "text"),
    [
        (True, WorkerDiedError, r"update_actor, worker rank 1 of 2 .* was killed by SIGKILL"),
        (False, ValueError, "this rank has had enough"),
    ],
)
def test_a_rank_that_is_lost_in_an_update_is_named_within_seconds(
    tiny_dir: Path, is_killed: bool, error: type[Exception], text: str
) -> None:
    config = tiny_config(tiny_dir, ppo_mini_batch_size=8, ppo_micro_batch_size_per_gpu=1)
    roles = {"worker": (FailingActor, (config, is_killed))}
    with start("local", roles, deadlines=Deadlines(grace_s=2.0)) as group:
        group.init_model(10)
        began = time.monotonic()
        with pytest.raises(error, match=text) as caught:
            group.update_actor(make_batch(8)).get()
        assert time.monotonic() - began < 20
    if not is_killed:
        notes = " ".join(caught.value.__notes__)
        assert "raised in FailingActor.update_actor, worker rank 1 of 2" in notes
        assert "not finished 2 s after the failure: worker rank 0 of 2" in notes
