"""The loss of a trainer's process ends the run with an error that names it, or is recovered."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, numbers, overrides
from tests.trainer.async_training import rigged_workers
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training import buffer, generators
from trainer.async_training.recipe import ASYNC
from verl_like.errors import WorkerDiedError

SETTINGS = (
    "trainer.backend=local",
    "async_training.topology=1m2t",
    "async_training.on_generator_failure=restart",
    *POLICY_ALONE,
    *FEW_ROWS,
)
RIGGED = "tests.trainer.async_training.rigged_workers"


class KillTrainer:
    """A callback that kills rank 1 of the trainers during generation for the second step."""

    killed_at = 0.0

    def on_sample_begin(self, trainer: Any) -> None:
        if trainer.global_step == 2:
            threading.Thread(target=self.kill, args=(trainer,), daemon=True).start()

    def kill(self, trainer: Any) -> None:
        wait_until(trainer.buffer.in_flight)
        os.kill(trainer.groups["actor"].transport.started[1].pid, signal.SIGKILL)
        self.killed_at = time.monotonic()


def test_a_trainer_lost_during_a_long_generation_ends_the_run_at_once(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer, "LOOK_S", 0.1)
    monkeypatch.setattr(generators, "END_S", 0.1)
    settings = (
        *SETTINGS,
        "async_training.max_staleness=0",
        f"role_workers.rollout={RIGGED}.LongRollout",
    )
    killer = KillTrainer()
    with pytest.raises(WorkerDiedError, match=r"ping, .* rank 1 of 2 .*killed by SIGKILL"):
        run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[killer])
    assert time.monotonic() - killer.killed_at < rigged_workers.GENERATION_S


def test_the_error_of_a_trainer_lost_in_a_sync_names_no_generator(
    tiny_dir: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, f"role_workers.actor={RIGGED}.DiesAsItSends")
    # both ranks die, and the step may meet either of them first
    killed = r"actor.* rank [01] of 2 .*killed by SIGKILL"
    with pytest.raises(WorkerDiedError, match=killed) as died:
        run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC))
    assert "generator" not in str(died.value)


def of_training(folder: Path) -> list[dict[str, float]]:
    """Return the steps' metrics without generators' times."""
    return [
        {name: number for name, number in line.items() if not name.startswith("async/")}
        for line in numbers(folder)
    ]
