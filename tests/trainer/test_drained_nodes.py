"""A run whose nodes go, and that cannot move or save, warns and continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.recipes.regression import RegressionTrainer
from tests.trainer.test_loop import config as regression
from trainer import run
from trainer.groups import cluster


def drained_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left_s: float, **settings: Any
) -> list[int]:
    """Run four steps whose student is on a drained node from step 2 on; return the checkpoints."""

    class Notified(RegressionTrainer):
        def step(self) -> dict[str, float]:
            if self.global_step == 2:
                monkeypatch.setattr(cluster, "pools_to_move", lambda *_: {"student_pool": left_s})
                self.run.checkpoints.took_s["write"] = 20.0
            return super().step()

    monkeypatch.setattr(cluster, "can_move", lambda *_: False)
    run(regression(folder, "split", total_training_steps=4, **settings), Notified)
    return sorted(int(path.name.split("_")[-1]) for path in folder.glob("global_step_*"))


def test_without_room_the_step_is_saved_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert drained_run(tmp_path, monkeypatch, 25.0, save_freq=100) == [2, 4]
    (text,) = [text for text in caplog.messages if "drains" in text]
    assert "student_pool, which are gone in 25 s, and no other node has room. Step 2 is s" in text


@pytest.mark.parametrize(
    ("left_s", "settings", "why"),
    [
        (15.0, {"save_freq": 100}, "a checkpoint takes 20 s (the last one)"),
        (float("inf"), {"save_freq": -1, "save_every_minutes": "null"}, "checkpoints are disabled"),
    ],
)
def test_a_checkpoint_that_cannot_be_ready_is_not_begun(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    left_s: float,
    settings: dict[str, Any],
    why: str,
) -> None:
    assert drained_run(tmp_path, monkeypatch, left_s, **settings) in ([], [4])
    (text,) = [text for text in caplog.messages if "drains" in text]
    assert f"step 2 is not saved, because {why}" in text
    assert "inf" not in text
