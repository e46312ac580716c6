"""Senders and receivers of weights are killed at each place of a sync; the run recovers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, overrides
from tests.trainer.async_training.test_lost_processes import of_training
from tests.trainer.dying_in_sync import ORDER, PLACES, Receiver
from tests.trainer.process_backends import BACKENDS, start_processes
from trainer import load_config, recovery, run
from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.ppo.recipe import PPO
from trainer.rollouts import rollouts

RIGGED = "tests.trainer.dying_in_sync"
SHARED = (
    *FEW_ROWS,
    *POLICY_ALONE,
    "trainer.save_freq=1",
    "trainer.max_restarts=50",
    f"trainer.total_training_steps={2 * len(PLACES) + 3}",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes=0.1",
)
GENERATORS = ("async_training.max_staleness=0", "async_training.on_generator_failure=restart")
Cell = tuple[Recipe[Any], tuple[str, ...], tuple[str, str]]
"""A recipe, its settings, and who is killed: role and rank of a sender, and of a receiver."""
OF_ONE_RANK: dict[str, Cell] = {
    "ppo": (PPO, ("placement=standalone", "trainer.n_gpus_per_node=2"), ("actor 0", "rollout 0")),
    "async": (ASYNC, GENERATORS, ("actor 0", "rollout 0")),
}
OF_TWO_RANKS: dict[str, Cell] = {
    "ppo": (PPO, ("placement=standalone", "trainer.n_gpus_per_node=4"), ("actor 1", "rollout 1")),
    "async": (ASYNC, (*GENERATORS, "async_training.topology=2m2t"), ("actor 1", "rollout_1 0")),
}
SLOW_ON_RAY = pytest.mark.ray, pytest.mark.slow


class Orders:
    """A callback that orders the kills one after the other, at most one per step."""

    last_step = 0

    def __init__(self, kills: Sequence[tuple[str, str]]) -> None:
        self.kills = list(kills)

    def on_step_begin(self, trainer: Any) -> None:
        order = trainer.folder / ORDER
        if self.kills and not order.exists() and trainer.global_step > self.last_step:
            self.last_step = trainer.global_step
            order.write_text(" ".join(self.kills.pop(0)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("backend", "cell"),
    [
        pytest.param("local", OF_ONE_RANK["ppo"], id="ppo"),
        pytest.param("ray", OF_ONE_RANK["ppo"], marks=SLOW_ON_RAY, id="ppo-ray"),
        pytest.param("ray", OF_ONE_RANK["async"], marks=pytest.mark.ray, id="async-ray"),
        pytest.param("ray", OF_TWO_RANKS["ppo"], marks=SLOW_ON_RAY, id="ppo-two-ray"),
        pytest.param("ray", OF_TWO_RANKS["async"], marks=SLOW_ON_RAY, id="async-two-ray"),
    ],
)
def test_a_run_with_kills_recovers_to_the_same_numbers(
    backend: str,
    cell: Cell,
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    recipe, settings, roles = cell
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = (*SHARED, *settings)
    run(load_config(overrides(tiny_dir, whole, *settings, *BACKENDS["local"]), recipe))

    monkeypatch.setattr(recovery, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(rollouts, "RolloutWorker", Receiver)  # so it is replaced within a step
    start_processes(backend, monkeypatch, request)
    rigged = f"role_workers.actor={RIGGED}.Sender", f"role_workers.rollout={RIGGED}.Receiver"
    orders = Orders(list(product(roles, PLACES)))
    here = overrides(tiny_dir, killed, *settings, *rigged, *BACKENDS[backend])
    run(load_config(here, recipe), callbacks=[orders])
    assert not (killed / ORDER).exists(), "all happened"
    assert not orders.kills
    assert of_training(killed) == of_training(whole)
    assert "its result was never read" not in caplog.text
