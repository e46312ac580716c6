"""A run validates with averaged weights, and continues training with its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.recording import RecordingTrainer
from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from trainer import load_config, run
from trainer.run_state import Metrics

SETTINGS = (
    "trainer.backend=local",
    *(*POLICY_ALONE, *FEW_ROWS),
    "trainer.total_training_steps=2",
    "trainer.test_freq=1",
)
DECAY = "actor_rollout_ref.actor.ema_decay"


class Validated(RecordingTrainer):
    """Stores the rollout's hash while it validates."""

    def on_train_begin(self) -> None:
        self.validated: list[set[str]] = []
        score = self.rollouts.score

        def record(*args: Any, **settings: Any) -> Any:
            self.validated.append(set(self.groups["rollout"].weights_checksum()))
            return score(*args, **settings)

        self.rollouts.score = record  # type: ignore[method-assign]


def trained(tiny: Path, folder: Path, *more: str) -> tuple[Validated, list[Metrics]]:
    """Return the trainer, and the steps' metrics without those of validation and versions."""
    files = f"data.val_files={tiny}/val.parquet"
    run(load_config(overrides(tiny, folder, *SETTINGS, files, *more)), Validated)
    other = ("timing", "perf/", "val-", "training/weight_version", "mismatch")
    metrics = [
        {name: line[name] for name in line if not name.startswith(other)} for line in lines(folder)
    ]
    return Validated.last, metrics


def test_only_validation_sees_the_average(tiny_dir: Path, tmp_path: Path) -> None:
    placement = ("placement=standalone", "trainer.n_gpus_per_node=2")
    _, plain = trained(tiny_dir, tmp_path / "plain", *placement)
    trainer, averaged = trained(tiny_dir, tmp_path / "averaged", *placement, f"{DECAY}=0.5")
    assert averaged == plain

    start, *_, last = trainer.history
    before, _, after_last = dict.fromkeys(map(frozenset, trainer.validated))
    assert before == start["actor"] == start["rollout"]
    assert last["actor"] == last["rollout"] != after_last


def test_an_average_that_nothing_reads_has_no_effect(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = overrides(tiny_dir, tmp_path, "trainer.backend=local", f"{DECAY}=0.5")
    load_config([*settings, "trainer.save_every_minutes=null"])
    assert "ema_decay has no effect: this run neither validates nor writes" in caplog.text
    caplog.clear()
    for read_by in ("trainer.save_freq=1", "trainer.save_every_minutes=1"):
        load_config([*settings, "trainer.save_every_minutes=null", read_by])
    load_config(settings)
    assert "has no effect" not in caplog.text
