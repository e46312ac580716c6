"""A step's samples are written while the driver would only wait for the update."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import PPOTrainer, load_config, run
from verl_like import Dispatch, register
from verl_like.batch.protocol import DataProto
from workers.roles.actor import ActorWorker

SLOW_S = 0.3
SHORT = (*POLICY_ALONE, "trainer.total_training_steps=2", "trainer.backend=local")


class SlowActor(ActorWorker):
    """Updates slowly."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, *more: DataProto) -> Any:
        time.sleep(SLOW_S)
        return super().update_actor(data, *more)


class Noting(PPOTrainer):
    """Records when samples are written, and when an update ends."""

    def on_update(self, batch: DataProto) -> None:
        self.written = time.monotonic()
        assert (self.run.folder / "rollouts" / f"{self.global_step}.jsonl").is_file()

    def update(self, batch: DataProto) -> dict[str, float]:
        updated = super().update(batch)
        self.ended = time.monotonic()
        return updated

    def on_step_end(self, metrics: dict[str, float]) -> None:
        assert self.ended - self.written > SLOW_S / 2
        assert metrics["response_length/mean"] > 0


def test_samples_are_written_while_the_actor_learns(tiny_dir: Path, tmp_path: Path) -> None:
    processes = "trainer.n_gpus_per_node=2"  # one would be the driver's own
    slow = f"role_workers.actor={__name__}.SlowActor"
    run(load_config(overrides(tiny_dir, tmp_path, *SHORT, processes, slow)), Noting)


class OwnUpdate(PPOTrainer):
    """Learns nothing."""

    def update(self, batch: DataProto) -> dict[str, float]:
        return {}


def test_an_update_of_the_users_own_has_its_samples_written_and_counted(
    tiny_dir: Path, tmp_path: Path
) -> None:
    run(load_config(overrides(tiny_dir, tmp_path, *SHORT)), OwnUpdate)
    assert len(list((tmp_path / "rollouts").glob("*.jsonl"))) == 2
    for line in lines(tmp_path):
        drawn = line["training/num_sampled_tokens"]
        assert line["training/num_excluded_tokens/by code of the run's own"] == drawn > 0
