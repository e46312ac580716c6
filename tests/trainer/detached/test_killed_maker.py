"""A maker's process is killed in the middle of a run, which goes on without losing a sample."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides
from trainer import load_config, run
from trainer.detached.recipe import DETACHED


class KillMaker:
    """A callback: kills a maker as the second step begins, or the validation after it."""

    def __init__(self, role: str = "rollout", at_validation: bool = False) -> None:
        self.pids: list[int] = []
        self.role, self.at_validation = role, at_validation

    def on_step_begin(self, trainer: Any) -> None:
        if not self.at_validation:
            self.kill(trainer)

    def on_validate_begin(self, trainer: Any) -> None:
        if self.at_validation:
            self.kill(trainer)

    def kill(self, trainer: Any) -> None:
        if trainer.global_step == 2:
            self.note(trainer)
            os.kill(self.pids[0], signal.SIGKILL)

    def on_train_end(self, trainer: Any) -> None:
        self.note(trainer)

    def note(self, trainer: Any) -> None:
        self.pids += [header.pid for header in trainer.groups[self.role].transport.started]


@pytest.mark.parametrize(
    ("backend", "topology", "policy"),
    [
        ("local", "1m2t", "restart"),
        ("local", "2m1t", "continue"),
        pytest.param("ray", "1m1t", "restart", marks=pytest.mark.ray),
    ],
)
def test_a_run_outlives_a_killed_maker(
    tiny_dir: Path,
    tmp_path: Path,
    backend: str,
    topology: str,
    policy: str,
    request: pytest.FixtureRequest,
) -> None:
    if backend == "ray":
        request.getfixturevalue("ray_session")
    settings = (
        f"trainer.backend={backend}",
        f"detached.topology={topology}",
        f"detached.on_maker_loss={policy}",
        "cpus_per_process=0.5" if backend == "ray" else "trainer.device=cpu",
        "trainer.total_training_steps=5",
        *POLICY_ALONE,
    )
    killer = KillMaker()
    run(load_config(overrides(tiny_dir, tmp_path, *settings), DETACHED), callbacks=[killer])
    assert len(lines(tmp_path)) == 5
    assert (killer.pids[0] == killer.pids[1]) == (policy == "continue")
    ledger = json.loads((tmp_path / "detached.json").read_text())["ledger"]
    assert sum(ledger["trainers"].values()) == 5 * 8 * 2
    rows = [path.read_text().splitlines() for path in (tmp_path / "rollouts").glob("*.jsonl")]
    assert len({json.loads(row)["uid"] for step in rows for row in step}) == 5 * 8


@pytest.mark.parametrize(
    ("topology", "policy", "role"),
    [
        ("1m1t", "restart", "rollout"),
        ("2m1t", "continue", "rollout"),
        ("2m1t", "restart", "rollout_1"),
    ],
)
def test_a_run_outlives_a_maker_that_is_killed_as_it_is_to_validate(
    tiny_dir: Path, classifier: Path, tmp_path: Path, topology: str, policy: str, role: str
) -> None:
    settings = (
        "trainer.backend=local",
        f"detached.topology={topology}",
        f"detached.on_maker_loss={policy}",
        f"rewards=[{{name: model, kind: model, path: '{classifier}'}}]",
        "detached.score_on=maker",
        f"data.val_files={tiny_dir}/few.parquet",
        "trainer.test_freq=1",
        "actor_rollout_ref.actor.ema_decay=0.9",
        *POLICY_ALONE,
    )
    killer = KillMaker(role, at_validation=True)
    run(load_config(overrides(tiny_dir, tmp_path, *settings), DETACHED), callbacks=[killer])
    assert (killer.pids[0] == killer.pids[1]) == (policy == "continue")
    scores = [line["val-core/verl_like/tiny_letters/reward/mean@1"] for line in lines(tmp_path)]
    assert len(scores) == 4
    files = sorted(path.name for path in (tmp_path / "validation").glob("*.jsonl"))
    assert len(files) == 4, "before the first step, and after each of three"
