"""Weights are sent while the trainer works: a slow send and a slow update overlap."""

from __future__ import annotations

from pathlib import Path

from tests.integration.runs import POLICY_ALONE, calls
from tests.trainer.async_training.rigged_workers import SEND_S
from tests.trainer.async_training.test_run import run_async


def intervals(folder: Path, method: str) -> list[tuple[float, float]]:
    """Return start and end in seconds of every call."""
    return [
        (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6) for event in calls(folder, method)
    ]


def test_slow_sends_and_slow_updates_overlap(tiny_dir: Path, tmp_path: Path) -> None:
    actor = "role_workers.actor=tests.trainer.async_training.rigged_workers.SlowActor"
    more = (
        "data.train_batch_size=4",
        "trainer.total_training_steps=5",
        "data.max_response_length=2",
        *POLICY_ALONE,
    )
    folder = run_async(tiny_dir, tmp_path, actor, "async_training.max_staleness=1", *more)
    sends = intervals(folder, "deliver_weights")
    scores, updates = intervals(folder, "compute_log_prob"), intervals(folder, "update_actor")
    work = [(score[0], update[1]) for score, update in zip(scores, updates, strict=True)]
    assert len(work) == 5
    shared = sum(
        max(min(send[1], busy[1]) - max(send[0], busy[0]), 0.0) for send in sends for busy in work
    )
    # of the sends except the first, during which nothing is trained, and the last
    assert shared > 0.7 * 3 * SEND_S
