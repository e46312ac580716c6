"""Truncated samples are removed only from the losses and their denominators."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integration.rigged import NotedTrainer
from tests.integration.runs import POLICY_ALONE, lines, overrides
from tests.workers.samples import learned, make_batch, started, tiny_config
from trainer import load_config, run
from trainer.ppo.config import PPOConfig
from trainer.ppo.filters import without_truncated
from verl_like.batch.protocol import DataProto
from workers.roles.actor import ActorWorker

REASONS = ["stop", "stop", "length", "stop", "abort", "length", "stop", "stop"]
KEPT = [0, 1, 3, 4, 6, 7]


def finished(*reasons: str) -> DataProto:
    batch = make_batch(len(reasons))
    batch.non_tensor_batch["finish_reason"] = np.array(reasons, object)
    return batch


def test_only_the_returned_mask_of_truncated_samples_changes() -> None:
    batch = finished(*REASONS)
    before = batch.batch["response_mask"].clone()
    masked, metrics = without_truncated(batch, PPOConfig(), 1)

    assert metrics == {"response/truncated_ratio": 0.25}
    assert batch.batch["response_mask"].equal(before)
    assert masked.batch["response_mask"][KEPT].equal(before[KEPT])
    assert not masked.batch["response_mask"][[2, 5]].any()
    assert masked.batch["advantages"] is batch.batch["advantages"]


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("rows", [1, 8])
def test_updates_ignore_truncated_samples(tiny_dir: Path, mode: str, rows: int) -> None:
    batch = finished(*REASONS)
    masked = update(tiny_dir, without_truncated(batch, PPOConfig(), 1)[0], mode, rows)
    whole = update(tiny_dir, batch.select_idxs(KEPT), mode, 8)
    assert masked == pytest.approx(whole, rel=1e-4, abs=1e-6)


def update(tiny_dir: Path, batch: DataProto, mode: str, rows: int) -> dict[str, float]:
    config = tiny_config(
        tiny_dir,
        ppo_mini_batch_size=len(batch),
        ppo_micro_batch_size_per_gpu=rows,
        loss_agg_mode=mode,
        entropy_coeff=0.01,
    )
    return learned(started(ActorWorker, config, 1).update_actor(batch))


def test_a_truncated_batch_has_no_loss(tiny_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    masked, metrics = without_truncated(finished("length", "length"), PPOConfig(), 1)
    assert metrics == {"response/truncated_ratio": 1.0}
    assert "all 2 samples of this step were truncated" in caplog.text
    metrics = update(tiny_dir, masked, "token-mean", 8)
    assert metrics["actor/pg_loss"] == metrics["actor/grad_norm"] == 0.0


def test_metrics_of_a_run_include_truncated_samples(tiny_dir: Path, tmp_path: Path) -> None:
    settings = ("trainer.backend=local", "trainer.total_training_steps=1", *POLICY_ALONE)
    more = ("data.max_response_length=4", "algorithm.mask_truncated=true")
    run(load_config(overrides(tiny_dir, tmp_path, *settings, *more)), NotedTrainer)

    metrics = lines(tmp_path)[-1]
    batch = NotedTrainer.batch
    share = np.mean(batch.non_tensor_batch["finish_reason"] == "length")
    assert 0 < metrics["response/truncated_ratio"] == share < 1
    lengths = batch.batch["response_mask"].sum(-1).double()
    assert metrics["response_length/mean"] == pytest.approx(lengths.mean().item())
