"""The worker of supervised fine-tuning, on one rank and on two."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, own_chunk, started, text_rows
from workers.config import OptimConfig
from workers.config.rows import RowDataConfig, RowWorkerConfig, TrainedModelConfig
from workers.roles.rows import SFTWorker

ROWS = 7
NONE: Mapping[str, Any] = {}


def worker_of(one_layer_dir: Path, model: Mapping[str, Any], **data: Any) -> SFTWorker:
    config = RowWorkerConfig(
        model=TrainedModelConfig(path=str(one_layer_dir / "model"), **model),
        optim=OptimConfig(lr=1e-3),
        data=RowDataConfig(**data),
    )
    return started(SFTWorker, config, 10)


def trained(one_layer_dir: Path, model: Mapping[str, Any] = NONE, **data: Any) -> dict[str, Any]:
    worker = worker_of(one_layer_dir, model, **data)
    rows = own_chunk(text_rows(ROWS), worker.rank, worker.world_size)
    metrics = [learned(worker.update_model(rows)) for _ in range(2)]
    log_probs = worker.compute_log_prob(rows).batch["log_probs"][: rows.num_real_rows]
    return {"metrics": metrics, "log_probs": log_probs}


def test_ranks_passes_padding_and_gradient_checkpointing_do_not_change_an_update(
    one_layer_dir: Path,
) -> None:
    alone = trained(one_layer_dir)
    one_by_one = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1}
    ranks = run_kept(2, trained, one_layer_dir)
    for other in (
        ranks[0] | {"log_probs": torch.cat([rank["log_probs"] for rank in ranks])},
        trained(one_layer_dir, **one_by_one),
        trained(one_layer_dir, {"use_remove_padding": False}),
        trained(one_layer_dir, {"enable_gradient_checkpointing": True}),
    ):
        for metrics, expected in zip(other["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
        torch.testing.assert_close(other["log_probs"], alone["log_probs"], atol=1e-3, rtol=0)
