"""Compare asynchronous step times predicted from a synchronous run's folder with measured ones.

    python benchmarks/bench_prediction.py [--longer 4] [--json FILE]

Rollout and actor sleep for known times per row, update and delivery; everything else is a normal
run. `--longer` multiplies the sleeps, so that delays on a busy machine matter less. Prints a line
per topology: the measured and predicted seconds per step (`verl-like predict-async DIR`), and their
ratio, which should be within 15 % of 1.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.cli import make_tiny
from trainer.planner.simulate import Phases, measured_phases, setup_of, simulate
from trainer.ppo.config import PPOConfig
from verl_like import Dispatch, register
from verl_like.batch.protocol import DataProto
from workers.roles.actor import ActorWorker
from workers.roles.rollout import RolloutWorker
from workers.weights.channel import SyncReport

ROW_S, TAKE_S, UPDATE_S = 0.0075, 0.04, 0.06
LONGER = "BENCH_SLEEP_LONGER"
"""Environment variable that tells worker processes the factor of all sleeps."""
WITHIN = 0.15
SETTINGS = (
    "algorithm.adv_estimator=grpo",
    "algorithm.use_kl_in_reward=false",
    "actor_rollout_ref.actor.use_kl_loss=false",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=4",
    "data.max_prompt_length=16",
    "data.max_response_length=2",
    "trainer.total_training_steps=8",
    "trainer.backend=local",
    "trainer.logger=[]",
    "role_workers.rollout=bench_prediction.SleepingRollout",
    "role_workers.actor=bench_prediction.SleepingActor",
)
A_POOL_EACH = (
    "role_mapping.rollout=generator_pool",
    "resource_pool_spec.generator_pool=[1]",
    "trainer.n_gpus_per_node=2",
)
TOPOLOGIES = (
    ("async_training.generators=1", "async_training.max_staleness=1"),
    ("async_training.generators=2", "async_training.max_staleness=0"),
)
"""Some topologies are limited by the generators, the others by the sum of all phases."""


def sleep(seconds: float) -> None:
    """Sleep for this time multiplied by the factor from the command line."""
    time.sleep(seconds * float(os.environ[LONGER]))


class SleepingRollout(RolloutWorker):
    """Sleeps for every row, and when it receives weights."""

    def _begin(self, data: DataProto) -> list[int]:
        """Sleep, then submit the rows."""
        sleep(ROW_S * len(data))
        return super()._begin(data)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def receive_weights(self, address: str, version: int) -> SyncReport:
        """Sleep, then receive the actor's weights."""
        sleep(TAKE_S)
        return super().receive_weights(address, version)


class SleepingActor(ActorWorker):
    """Sleeps in every update."""

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_actor(self, data: DataProto, ptx: DataProto | None = None) -> dict[str, float]:
        """Sleep, then run PPO's update."""
        sleep(UPDATE_S)
        return super().update_actor(data, ptx)


class Times:
    """A callback that records when each step ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Record the time."""
        self.ends.append(time.monotonic())


def phases_of_synchronous(tiny: list[str], folder: Path) -> Phases:
    """Return the phases of the synchronous run's middle step; all steps have the same work."""
    where = f"trainer.default_local_dir={folder}"
    # In a synchronous run, pools of one rank are also processes, as in asynchronous runs.
    apart = property(lambda config: frozenset({"global_pool", "generator_pool"}))
    with patch.object(PPOConfig, "child_pools", apart):
        run(load_config([*tiny, *SETTINGS, *A_POOL_EACH, where]))
    results = measured_phases(folder)[0]
    seconds = (results.generate, results.score, results.update, results.sync)
    return Phases(*([median(of_steps)] for of_steps in seconds))


def measured_and_predicted(
    phases: Phases, tiny: list[str], folder: Path, topology: tuple[str, ...]
) -> tuple[float, float]:
    """Return the measured seconds per asynchronous step, and those predicted from the phases."""
    where = f"trainer.default_local_dir={folder}"
    config = load_config([*tiny, *SETTINGS, *topology, where], ASYNC)
    times = Times()
    run(config, callbacks=[times])
    # the first two steps warm up
    steps = [end - before for before, end in pairwise(times.ends[1:])]
    return median(steps), simulate(phases, setup_of(config)).seconds


def measure(folder: Path) -> list[dict[str, Any]]:
    """Return a row for every topology."""
    tiny = make_tiny.make(folder / "tiny")
    tiny = [
        f"actor_rollout_ref.model.path={tiny}/model",
        f"data.train_files={tiny}/train.parquet",
    ]
    phases = phases_of_synchronous(tiny, folder / "synchronous")
    rows = []
    for number, topology in enumerate(TOPOLOGIES):
        measured, predicted = measured_and_predicted(phases, tiny, folder / str(number), topology)
        ratio = round(measured / predicted, 3)
        row = {"measured_s": measured, "predicted_s": predicted, "ratio": ratio}
        rows.append({"topology": " ".join(topology), **row, "holds": abs(ratio - 1) < WITHIN})
    return rows


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--longer", type=float, default=4, help="factor for all sleeps")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    os.environ[LONGER] = str(arguments.longer)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder))
    for row in rows:
        print("{topology}: {measured_s:.3f} s, predicted {predicted_s:.3f}: {ratio}".format(**row))
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
