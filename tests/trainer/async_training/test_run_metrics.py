"""The metrics of an asynchronous run, compared with the observations of a callback."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.integration.runs import POLICY_ALONE, lines, overrides
from tests.trainer.async_training.test_run import LOCAL, ledger_of
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.async_training.samplers import num_samples_of
from workers.columns import read_columns

LIMIT, BATCH, STEPS = 32, 16, 4
LONG_S = 0.15
"""Delay of one step: much longer than the milliseconds between the readings of two clocks."""


class Watches:
    """A callback that holds the first step until generators have filled the buffer."""

    def __init__(self) -> None:
        self.open_samples = 0
        self.depths: list[int] = []
        self.ages: list[Counter[int]] = []
        self.ends: list[float] = []

    def on_sample_end(self, trainer: Any, batch: Any) -> None:
        buffer = trainer.buffer
        if trainer.global_step == 1:
            wait_until(lambda: buffer.depth >= LIMIT)
            time.sleep(0.1)  # in which a generator that does not stop would begin its next chunk
            self.open_samples = buffer.depth + num_samples_of(buffer.in_flight())
        versions = read_columns(batch, "policy_version")["policy_version"].tolist()
        self.ages.append(Counter(trainer.weights.version - version for version in versions))
        self.depths.append(buffer.depth)

    def on_step_begin(self, trainer: Any) -> None:
        if trainer.global_step == 3:
            time.sleep(LONG_S)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.ends.append(time.monotonic())


class Watched(NamedTuple):
    """A run of one generator, at most four versions ahead, and the callback's observations."""

    folder: Path
    seen: Watches


@pytest.fixture(scope="module")
def watched(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    settings = (
        f"async_training.max_inflight_samples={LIMIT}",
        "async_training.max_staleness=4",
        "async_training.prompts_per_call=4",
        f"trainer.total_training_steps={STEPS}",
    )
    seen = Watches()
    config = load_config(overrides(tiny_dir, folder, LOCAL, *POLICY_ALONE, *settings), ASYNC)
    run(config, callbacks=[seen])
    return Watched(folder, seen)


def test_generators_wait_while_the_buffer_is_full(watched: Watched) -> None:
    assert watched.seen.open_samples == LIMIT
    assert ledger_of(watched.folder)["trainers"] == {"0": STEPS * BATCH}


def test_seconds_of_every_role_add_up_to_the_wall_time(watched: Watched) -> None:
    wall = watched.seen.ends[-1] - watched.seen.ends[0]
    assert wall > LONG_S
    for role in ("generator_0", "trainer"):
        names = [f"async/{role}/{state}_s" for state in ("busy", "waiting", "syncing")]
        seconds = sum(line[name] for line in lines(watched.folder)[1:] for name in names)
        # a step counts its seconds some milliseconds before callbacks see its end
        assert seconds == pytest.approx(wall, rel=0.05, abs=0.01)


def test_the_queue_depth_is_measured_after_a_batch_is_taken(watched: Watched) -> None:
    depths = [line["async/queue_depth"] for line in lines(watched.folder)]
    assert depths[0] == LIMIT, "nothing is made or taken while the step waits for a full buffer"
    for depth, before in zip(depths, watched.seen.depths, strict=True):
        assert before <= depth <= LIMIT


def test_the_staleness_histogram_equals_that_of_batches_and_ledger(watched: Watched) -> None:
    prefix = "async/staleness/"
    histograms = []
    for line in lines(watched.folder):
        names = [name for name in line if name.startswith(prefix) and name[len(prefix) :].isdigit()]
        histograms.append({int(name.removeprefix(prefix)): int(line[name]) for name in names})
    assert histograms == watched.seen.ages
    # the buffer was full of samples of the first version, which two more steps trained on
    assert histograms[:3] == [{0: BATCH}, {1: BATCH}, {2: BATCH}]
    whole = sum(map(Counter, histograms), Counter())
    assert ledger_of(watched.folder)["staleness"] == {str(age): whole[age] for age in whole}
