"""Steps with a non-finite gradient are skipped and named; too many in a row stop a run."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import make_batch, own_chunk, started, tiny_config
from verl_like.batch.protocol import DataProto
from verl_like.errors import WorkerError
from workers.config import RolloutCorrectionConfig
from workers.roles.actor import ActorWorker


def broken_batch() -> DataProto:
    """Four samples in two mini-batches; the first one's advantages are infinite."""
    batch = make_batch(4)
    batch.non_tensor_batch["uid"] = np.array(["7-0", "8-0", "9-0", "10-0"], dtype=object)
    batch.batch["advantages"][0, 0] = math.inf
    return batch


def update_twice(one_layer_dir: Path) -> tuple[list[tuple[float, int, bool]], str, bool]:
    """Return counts after one broken update, then the error of the sixth in a row."""
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=2)
    actor = started(ActorWorker, config, 10)
    broken = own_chunk(broken_batch(), actor.rank, actor.world_size)
    counts = []
    for _ in range(2):  # a good step after each broken one: never two in a row
        metrics = actor.update_actor(broken)
        counts.append(
            (
                metrics["actor/skipped_steps"],
                actor.engine.guard.total,
                math.isfinite(metrics["actor/pg_loss"]),
            )
        )
    actor.engine.spec = replace(actor.engine.spec, mini_batch=4)
    before = actor.weights_checksum()
    for _ in range(5):
        actor.update_actor(broken)
    with pytest.raises(WorkerError) as error:
        actor.update_actor(broken)
    return counts, str(error.value), actor.weights_checksum() == before


def assert_named(counts: list[tuple[float, int, bool]], message: str, unchanged: bool) -> None:
    assert counts == [(1.0, 1, True), (1.0, 2, True)]
    assert message.startswith("6 steps in a row had a non-finite gradient; the last: ")
    assert "Samples of the mini-batch: 10-0, 7-0, 8-0, 9-0." in message
    assert unchanged


def test_a_skipped_step_names_its_samples_and_six_in_a_row_are_an_error(
    one_layer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert_named(*update_twice(one_layer_dir))
    first = caplog.records[0].getMessage()
    assert (
        "step skipped. Samples of the mini-batch: 7-0, 9-0. Skipped steps: 1 in a row, 1 in total."
        in first
    )


def test_a_skipped_step_names_the_samples_of_every_rank(one_layer_dir: Path) -> None:
    for result in run_kept(2, update_twice, one_layer_dir):
        assert_named(*result)


def test_a_resumed_worker_continues_the_count(tiny_dir: Path, tmp_path: Path) -> None:
    config = tiny_config(tiny_dir, ppo_mini_batch_size=4)
    actor = started(ActorWorker, config, 10)
    for _ in range(5):
        actor.update_actor(broken_batch())
    actor.save_checkpoint(str(tmp_path / "actor"), 1)

    resumed = started(ActorWorker, config, 10)
    resumed.load_checkpoint(str(tmp_path / "actor"))
    with pytest.raises(WorkerError, match=r"^6 steps in a row had a non-finite gradient"):
        resumed.update_actor(broken_batch())


BYPASS = {"bypass_mode": True}
WEIGHED = {"bypass_mode": True, "loss_type": "reinforce", "rollout_is": "token"}


@pytest.mark.parametrize(
    ("column", "correction", "value"),
    [
        ("old_log_probs", {}, math.inf),
        ("rollout_log_probs", BYPASS, -math.inf),
        ("rollout_log_probs", WEIGHED, math.nan),
        ("ref_log_prob", {}, math.nan),
    ],
)
def test_a_non_finite_log_prob_skips_the_step(
    one_layer_dir: Path, column: str, correction: dict[str, Any], value: float
) -> None:
    config = tiny_config(one_layer_dir, ppo_mini_batch_size=4, use_kl_loss=True)
    config.algorithm.rollout_correction = RolloutCorrectionConfig(**correction)
    actor = started(ActorWorker, config, 10)
    batch = make_batch(4)
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    batch.batch[column][0, 0] = value
    before = actor.weights_checksum()
    assert actor.update_actor(batch)["actor/skipped_steps"] == 1.0
    assert actor.weights_checksum() == before
