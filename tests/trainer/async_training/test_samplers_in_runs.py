"""Every sampler in a run whose generators are always as far ahead as allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from tests.trainer.async_training.test_run import LOCAL, ledger_of
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC

STEPS, BATCH = 4, 8
AHEAD = (
    LOCAL,
    "async_training.max_staleness=2",
    "async_training.prompts_per_call=1",
    f"trainer.total_training_steps={STEPS}",
    *(*POLICY_ALONE, *FEW_ROWS),
)
TWO_GENERATORS = "async_training.generators=2"


class FullQueue:
    """A callback that holds a step until generators have filled the buffer."""

    def on_sample_end(self, trainer: Any, batch: Any) -> None:
        num_left = BATCH * min(2, STEPS - trainer.global_step)
        wait_until(lambda: trainer.buffer.depth == num_left)


def ages(folder: Path) -> list[float]:
    """Return the age in versions of the oldest sample of each step."""
    return [line["async/staleness/max"] for line in lines(folder)]


def dropped(folder: Path) -> dict[str, int]:
    """Return dropped samples by reason; every other sample was trained on or is still queued."""
    reasons: dict[str, int] = {}
    for row in ledger_of(folder)["generators"].values():
        for reason, number in row["dropped"].items():
            reasons[reason] = reasons.get(reason, 0) + number
        accounted = row["trained"] + row["queued"] + row["in_flight"]
        assert row["made"] == accounted + sum(row["dropped"].values())
    return reasons


def test_a_version_window_drops_older_samples(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (
        *AHEAD,
        TWO_GENERATORS,
        "async_training.sampler=version_window",
        "async_training.drop_older_than=1",
    )
    config = load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC)
    run(config, callbacks=[FullQueue()])
    assert ages(tmp_path) == [0, 1, 1, 1]
    assert dropped(tmp_path) == {"older than 1 versions": BATCH}
    assert ledger_of(tmp_path)["trainers"] == {"0": STEPS * BATCH}
