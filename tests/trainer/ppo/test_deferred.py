"""What the driver does while it waits for an update."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, overrides
from trainer import load_config, run
from trainer.ppo.deferred import DeferredWork
from trainer.ppo.step import PPOTrainer
from verl_like import Dispatch, register
from verl_like.batch.protocol import DataProto
from workers.roles.actor import ActorWorker

SLOW_S = 0.3


def test_work_is_done_once_at_the_first_use_or_for_the_result() -> None:
    done: list[str] = []

    def work(name: str) -> dict[str, float]:
        done.append(name)
        return {name: 1.0}

    deferred = DeferredWork()
    deferred.run()
    deferred.defer(lambda: work("early"))
    deferred.run()
    deferred.run()
    assert done == ["early"]
    assert deferred.result() == {"early": 1.0}
    deferred.defer(lambda: work("forgotten"))
    deferred.defer(lambda: work("late"))
    assert deferred.result() == {"late": 1.0}
    assert done == ["early", "late"]


def test_an_error_waits_for_whoever_asks_for_the_result() -> None:
    deferred = DeferredWork()
    deferred.defer(lambda: {}[0])
    deferred.run()
    with pytest.raises(KeyError):
        deferred.result()


class SlowActor(ActorWorker):
    """An update takes a while."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, *more: DataProto) -> Any:
        time.sleep(SLOW_S)
        return super().update_actor(data, *more)


class Noting(PPOTrainer):
    """Notes when samples are written, and when an update has ended."""

    def note_samples(self, batch: DataProto) -> dict[str, float]:
        noted = super().note_samples(batch)
        self.written = time.monotonic()
        return noted

    def update(self, batch: DataProto) -> dict[str, float]:
        updated = super().update(batch)
        self.ended = time.monotonic()
        return updated

    def on_step_end(self, metrics: dict[str, float]) -> None:
        assert self.ended - self.written > SLOW_S / 2
        assert metrics["response_length/mean"] > 0
        assert (self.folder / "rollouts" / f"{self.global_step}.jsonl").is_file()


def test_samples_are_written_while_the_actor_learns(tiny_dir: Path, tmp_path: Path) -> None:
    more = (*POLICY_ALONE, "trainer.total_training_steps=2", "trainer.backend=local")
    processes = "trainer.n_gpus_per_node=2"  # one would be the driver's own
    slow = f"role_workers.actor={__name__}.SlowActor"
    run(load_config(overrides(tiny_dir, tmp_path, *more, processes, slow)), Noting)
