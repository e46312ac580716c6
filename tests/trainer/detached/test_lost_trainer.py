"""A trainer's process that is gone ends the run, soon and by its own name."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, overrides
from tests.trainer.detached import rigged_workers
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.detached import source, watch
from trainer.detached.recipe import DETACHED
from verl_like.errors import WorkerDiedError

SETTINGS = (
    "trainer.backend=local",
    "detached.topology=1m2t",
    "detached.on_maker_loss=restart",
    *POLICY_ALONE,
)
RIGGED = "tests.trainer.detached.rigged_workers"


class KillTrainer:
    """A callback: kills rank 1 of the trainers once the samples of the second step are made."""

    killed_at = 0.0

    def on_sample_begin(self, trainer: Any) -> None:
        if trainer.global_step == 2:
            threading.Thread(target=self.kill, args=(trainer,), daemon=True).start()

    def kill(self, trainer: Any) -> None:
        wait_until(trainer.source.buffer.in_flight)
        os.kill(trainer.groups["actor"].transport.started[1].pid, signal.SIGKILL)
        self.killed_at = time.monotonic()


def test_a_trainer_that_dies_during_a_long_generation_ends_the_run_before_it_is_over(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "PING_S", 0.1)
    monkeypatch.setattr(source, "END_S", 0.1)
    settings = (*SETTINGS, "detached.max_staleness=0", f"role_workers.rollout={RIGGED}.LongRollout")
    killer = KillTrainer()
    with pytest.raises(WorkerDiedError, match=r"ping, .* rank 1 of 2 .*killed by SIGKILL"):
        run(load_config(overrides(tiny_dir, tmp_path, *settings), DETACHED), callbacks=[killer])
    assert time.monotonic() - killer.killed_at < rigged_workers.GENERATION_S


def test_a_trainer_that_dies_as_it_sends_weights_is_no_makers_loss(
    tiny_dir: Path, tmp_path: Path
) -> None:
    settings = (*SETTINGS, f"role_workers.actor={RIGGED}.DiesAsItSends")
    with pytest.raises(WorkerDiedError, match=r"actor.* rank 0 of 2 .*killed by SIGKILL") as died:
        run(load_config(overrides(tiny_dir, tmp_path, *settings), DETACHED))
    assert "maker" not in str(died.value)
