"""The workers of preference training: passes, padding and ranks do not change the result."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import workers.losses.preference  # noqa: F401
from tests.workers.kept_ranks import run_kept
from tests.workers.samples import learned, own_chunk, random_row, started
from trainer.data.pairs import LabeledRow, PairRow
from trainer.preference.step import PreferenceTrainer, labeled_columns
from verl_like.batch.protocol import DataProto
from workers.columns import write_columns
from workers.config import OptimConfig
from workers.config.rows import (
    PreferenceWorkerConfig,
    ReferenceConfig,
    ReferenceModelConfig,
    RowDataConfig,
    TrainedModelConfig,
)
from workers.roles.rows import PreferenceReferenceWorker, PreferenceWorker
from workers.training.microbatch import MiniBatch

ROWS = 5


def batch_of(loss: str) -> DataProto:
    """Return rows of some lengths, with all columns of the loss."""
    generator = torch.Generator().manual_seed(3)
    side = partial(random_row, generator)
    rows = [
        LabeledRow(side(), side(), number % 2 == 0) if loss == "kto" else PairRow(side(), side())
        for number in range(ROWS)
    ]
    batch = PreferenceTrainer.make_batch(
        list(enumerate(rows)), [f"row {n}" for n in range(ROWS)], pad_token_id=0
    )
    noise = torch.randn(ROWS, 2, generator=generator, dtype=torch.float64)
    if loss != "kto":
        return write_columns(batch, ref_log_probs=noise - 20)
    columns = labeled_columns(noise[:, 0] + 1, noise[:, 1], batch.batch["desirable"])
    return write_columns(batch, ref_log_probs=noise[:, 0] - 20, **columns)


def config_of(
    one_layer_dir: Path, loss: str, rows_per_pass: int | None = None, packed: bool = True
) -> PreferenceWorkerConfig:
    path = str(one_layer_dir / "model")
    data = RowDataConfig(
        use_dynamic_bsz=rows_per_pass is None, micro_batch_size_per_gpu=rows_per_pass or 8
    )
    return PreferenceWorkerConfig(
        model=TrainedModelConfig(path=path, use_remove_padding=packed),
        optim=OptimConfig(lr=1e-3),
        data=data,
        loss=loss,
        ref=ReferenceConfig(model=ReferenceModelConfig(path=path)),
    )


def trained(one_layer_dir: Path, loss: str, *settings: Any) -> dict[str, Any]:
    worker = started(PreferenceWorker, config_of(one_layer_dir, loss, *settings), 10)
    rows = own_chunk(batch_of(loss), worker.rank, worker.world_size)
    before = worker.compute_log_prob(rows).batch["response_log_probs"][: rows.num_real_rows]
    return {"metrics": [learned(worker.update_model(rows)) for _ in range(2)], "before": before}


@pytest.mark.parametrize("loss", ["dpo", "orpo", "kto"])
def test_passes_padding_and_ranks_do_not_change_an_update(loss: str, one_layer_dir: Path) -> None:
    alone = trained(one_layer_dir, loss)
    assert alone["metrics"][1]["train/loss"] < alone["metrics"][0]["train/loss"]
    ranks = run_kept(2, trained, one_layer_dir, loss, 1)  # three passes, and two with a dummy
    others = [
        trained(one_layer_dir, loss, 2),
        trained(one_layer_dir, loss, None, False),
        {"metrics": ranks[1]["metrics"], "before": torch.cat([rank["before"] for rank in ranks])},
    ]
    for other in others:
        for metrics, expected in zip(other["metrics"], alone["metrics"], strict=True):
            assert metrics == pytest.approx(expected, rel=1e-3, abs=1e-5)
        torch.testing.assert_close(other["before"], alone["before"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo", "simpo", "kto"])
def test_a_dummy_row_has_no_loss_and_no_gradient(loss: str, one_layer_dir: Path) -> None:
    worker = PreferenceWorker(config_of(one_layer_dir, loss))
    columns = {name: torch.zeros_like(column[:1]) for name, column in batch_of(loss).batch.items()}
    log_probs = torch.zeros(columns["response_mask"].shape, requires_grad=True)
    share, metrics = worker.loss({"log_probs": log_probs}, columns, MiniBatch({}, 4, 9, []))
    share.backward()
    assert float(share.detach()) == 0
    assert log_probs.grad is not None
    assert not log_probs.grad.any()
    assert not any(float(value.detach()) for value in metrics.values())


def test_the_reference_is_the_model_before_training(one_layer_dir: Path) -> None:
    batch, config = batch_of("dpo"), config_of(one_layer_dir, "dpo")
    config.model.lora_rank = 4
    worker = started(PreferenceWorker, config, 10)
    separate = started(PreferenceReferenceWorker, config)
    expected = separate.compute_ref_log_prob(batch).batch["response_log_probs"]
    for _ in range(2):
        log_probs = worker.compute_ref_log_prob(batch).batch["response_log_probs"]
        assert torch.equal(log_probs, expected)  # computed without the adapters
        assert worker.reference_checksum() == separate.reference_checksum()
        worker.update_model(batch)
    assert not torch.equal(worker.compute_log_prob(batch).batch["response_log_probs"], expected)
