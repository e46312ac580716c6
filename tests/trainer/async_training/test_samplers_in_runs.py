"""Every sampler in a run whose generators are always as far ahead as allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from tests.trainer.async_training.test_run import LOCAL, ledger_of
from tests.trainer.async_training.uids import uids_in_order, uids_of
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.async_training.samplers import (
    BatchSampler,
    BufferView,
    SelectedBatch,
    select_chunks,
    urgent_chunks_first,
)

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


class NewestFirst(BatchSampler):
    """A user's sampler: samples that are due first, then those of the newest weights."""

    def choose(self, view: BufferView) -> SelectedBatch:
        newest = sorted(view.ready, key=lambda one: one.version, reverse=True)
        ordered = urgent_chunks_first(view, newest)
        return (
            SelectedBatch()
            if ordered is None
            else SelectedBatch(select_chunks(ordered, view.num_samples))
        )


def test_a_sampler_that_takes_others_first_leaves_none_out_and_lets_none_grow_too_old(
    tiny_dir: Path, tmp_path: Path
) -> None:
    settings = (*AHEAD, TWO_GENERATORS, f"async_training.sampler={__name__}.NewestFirst")
    config = load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC)
    run(config, callbacks=[FullQueue()])
    assert ages(tmp_path) == [0, 1, 2, 2]
    assert dropped(tmp_path) == {}
    trained, in_order = uids_of(tmp_path, STEPS), uids_in_order(tiny_dir, STEPS, *FEW_ROWS)
    assert sorted(sum(trained, [])) == sorted(sum(in_order, []))


def test_a_version_window_drops_what_is_older_and_takes_other_prompts(
    tiny_dir: Path, tmp_path: Path
) -> None:
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


class Evictions:
    """A callback that holds the first step until three batches have been evicted."""

    def on_sample_end(self, trainer: Any, batch: Any) -> None:
        generators = trainer.origins.log.accounts
        wait_until(lambda: sum(row.dropped.total() for row in generators.values()) >= 3 * BATCH)


def test_a_full_buffer_that_evicts_drops_the_oldest_and_the_run_goes_on(
    tiny_dir: Path, tmp_path: Path
) -> None:
    evicts = (
        f"async_training.max_inflight_samples={BATCH}",
        "async_training.on_buffer_full=evict_oldest",
    )
    settings = (*AHEAD, *evicts, "async_training.sampler=ready_first")
    config = load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC)
    run(config, callbacks=[Evictions()])
    # what was made first of all that was made after the first batch is gone
    gone = sum(uids_in_order(tiny_dir, 4, *FEW_ROWS), [])
    assert not set(uids_of(tmp_path, 2)[1]) & set(gone)
    assert max(ages(tmp_path)) <= 2
    assert max(line["async/queue_depth"] for line in lines(tmp_path)) <= BATCH
    (reason,) = dropped(tmp_path)
    assert reason == "pushed out of the full buffer"
    assert dropped(tmp_path)[reason] >= 3 * BATCH
    assert ledger_of(tmp_path)["trainers"] == {"0": STEPS * BATCH}
