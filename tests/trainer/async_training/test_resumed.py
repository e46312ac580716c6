"""Runs that end while samples are queued, and resume from their checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, calls, overrides
from tests.trainer.async_training.test_run import LOCAL, ledger_of, run_async
from tests.trainer.async_training.uids import uids_in_order, uids_of
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training.buffer import SAMPLES
from trainer.async_training.recipe import ASYNC
from trainer.observers.sample_log import REGENERATED
from verl_like.errors import CallbackError


class EndsWithFullQueue:
    """A callback that fails the second of three steps, with samples for two steps queued."""

    def on_sample_end(self, trainer: Any, batch: Any) -> None:
        # until the generators may make no more, so that checkpoints do not depend on the clock
        wait_until(lambda: trainer.buffer.depth == 2 * len(batch))

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.global_step == 2:
            raise KeyError("the end")


def interrupted_run(tiny: Path, folder: Path, *more: str) -> Path:
    """Interrupt a run in its second step; return the folder of its checkpoint's queued samples."""
    settings = (LOCAL, "trainer.save_freq=1", "async_training.max_staleness=2", *more)
    with pytest.raises(CallbackError, match="the end"):
        run(load_config(overrides(tiny, folder, *settings), ASYNC), callbacks=[EndsWithFullQueue()])
    return folder / "global_step_1" / SAMPLES


@pytest.mark.long
def test_a_resumed_run_trains_on_each_sample_once(tiny_dir: Path, tmp_path: Path) -> None:
    settings = (
        "async_training.generators=2",
        "async_training.on_resume=regenerate",
        *(*POLICY_ALONE, *FEW_ROWS),
    )
    queued = interrupted_run(tiny_dir, tmp_path, *settings)
    assert len(list(queued.glob("*.safetensors"))) == 0
    run_async(
        tiny_dir, tmp_path, "async_training.max_staleness=2", "trainer.save_freq=1", *settings
    )

    assert uids_of(tmp_path, 3) == uids_in_order(tiny_dir, 3, *FEW_ROWS)
    assert len(calls(tmp_path, "submit")) == 10
    ledger = ledger_of(tmp_path)
    assert ledger["trainers"] == {"0": 3 * 8}
    lost = [row["dropped"] for row in ledger["generators"].values()]
    assert sum(row.get(REGENERATED, 0) for row in lost) == 2 * 8
    assert sum(row["made"] for row in ledger["generators"].values()) == 3 * 8 + 2 * 8
