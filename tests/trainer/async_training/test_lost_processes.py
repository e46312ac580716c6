"""A run continues after the loss of a generator, and ends with an error after that of a trainer."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, numbers, overrides
from tests.trainer.async_training import rigged_workers
from tests.trainer.async_training.test_run import (
    LOCAL,
    TWO_STEPS,
    ledger_of,
    run_async,
    shared_numbers,
)
from tests.trainer.async_training.uids import uids_in_order, uids_of
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training import buffer, generators
from trainer.async_training.buffer import LOST
from trainer.async_training.recipe import ASYNC
from verl_like.errors import WorkerDiedError


class Pids:
    """A callback that records the rollout's process at the beginning and at the end of the run."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_begin(self, trainer: Any) -> None:
        self.seen += [header.pid for header in trainer.groups["rollout"].transport.started]

    def on_train_end(self, trainer: Any) -> None:
        self.on_train_begin(trainer)


class KillGenerator(Pids):
    """Kills the generator as the validation after the first step begins."""

    def on_validate_begin(self, trainer: Any) -> None:
        if trainer.global_step == 1:
            os.kill(self.seen[0], signal.SIGKILL)


@pytest.mark.parametrize(
    ("backend", "topology", "policy", "num_lost"),
    [
        ("local", "2m1t", "continue", 4),
        pytest.param("ray", "1m1t", "restart", 8, marks=pytest.mark.ray),
    ],
)
def test_a_run_keeps_the_order_of_prompts_after_a_generator_is_killed(
    tiny_dir: Path,
    tmp_path: Path,
    backend: str,
    topology: str,
    policy: str,
    num_lost: int,
    request: pytest.FixtureRequest,
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_session")
    settings = (
        f"trainer.backend={backend}",
        f"async_training.topology={topology}",
        f"async_training.on_generator_failure={policy}",
        "cpus_per_process=0.5" if backend == "ray" else "trainer.device=cpu",
        "role_workers.rollout=tests.trainer.async_training.rigged_workers.DiesOnce",
        *(*POLICY_ALONE, *FEW_ROWS),
    )
    pids = Pids()
    run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[pids])
    assert uids_of(tmp_path, 3) == uids_in_order(tiny_dir, 3, *FEW_ROWS)
    assert (pids.seen[0] == pids.seen[1]) == (policy == "continue")
    ledger = ledger_of(tmp_path)
    assert sum(ledger["trainers"].values()) == 3 * 4 * 2
    assert ledger["generators"]["0"]["dropped"] == {LOST: num_lost}


def test_a_generator_killed_in_a_validation_is_replaced(
    tiny_dir: Path, classifier: Path, few_validated: str, tmp_path: Path
) -> None:
    settings = (
        LOCAL,
        "async_training.on_generator_failure=restart",
        f"reward.list=[{{name: model, kind: model, path: '{classifier}'}}]",
        "async_training.score_on=generator",
        few_validated,
        "trainer.test_freq=1",
        "actor_rollout_ref.actor.ema_decay=0.9",
        *(*POLICY_ALONE, *FEW_ROWS, TWO_STEPS),
    )
    killer = KillGenerator()
    run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[killer])
    assert killer.seen[0] != killer.seen[1]
    scores = [line["val-core/verl_like/tiny_letters/reward/mean@1"] for line in lines(tmp_path)]
    assert len(scores) == 3
    files = sorted(path.name for path in (tmp_path / "validation").glob("*.jsonl"))
    assert len(files) == 3, "before the first step, and after each of two"


@pytest.mark.long
def test_a_chunk_of_a_lost_rank_is_repeated_with_the_same_numbers(
    tiny_dir: Path, tmp_path: Path
) -> None:
    policy = (*POLICY_ALONE, *FEW_ROWS)
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *policy)))
    two_ranks = (
        "resource_pool_spec={trainer_pool: [1], generator_0_pool: [2]}",
        "trainer.n_gpus_per_node=3",
        "trainer.device=cpu",
        "role_workers.rollout=tests.trainer.async_training.rigged_workers.DiesOnce",
        "async_training.max_staleness=0",
        "async_training.on_generator_failure=restart",
    )
    folder = run_async(tiny_dir, tmp_path / "async", *policy, *two_ranks)
    assert shared_numbers(folder) == shared_numbers(tmp_path / "plain")
    (generator,) = ledger_of(folder)["generators"].values()
    assert (generator["made"], generator["trained"], generator["dropped"]) == (32, 24, {LOST: 8})


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
    monkeypatch.setattr(buffer, "CHECK_EVERY_S", 0.1)
    monkeypatch.setattr(generators, "END_TIMEOUT_S", 0.1)
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
