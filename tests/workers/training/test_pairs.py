"""Pairs in the engine: passes, ranks and padding change no result, and pairs stay together."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from tests.workers.kept_ranks import run_kept
from tests.workers.samples import own_chunk, random_row, started
from trainer.data.pairs import PairRow, pair_batch
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import rectangle_of
from workers.config import OptimConfig
from workers.config.rows import RowDataConfig, RowWorkerConfig, TrainedModelConfig
from workers.models.load import load_model
from workers.roles.rows import RowWorker
from workers.training.engine import INPUTS
from workers.training.microbatch import Columns, MiniBatch
from workers.training.readings import Pairs, Reading, RowScores
from workers.training.row_proof import RowPasses

PAIRS = 5


class LikelierWorker(RowWorker):
    """Makes the chosen response likelier than the rejected one."""

    def reading(self) -> Reading:
        return Pairs(Reading())

    def loss(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        gap = outputs["log_probs"].sum(-1).diff(dim=1)[:, 0].neg()
        real = columns["response_mask"].any(-1).all(-1)
        share = -(logsigmoid(gap) * real).sum() / (batch.num_rows / 2)
        return share, {"loss": share, "gap": (gap * real).sum() / (batch.num_rows / 2)}


class HigherWorker(LikelierWorker):
    """Scores the chosen row above the rejected one."""

    head = "scalar"

    def reading(self) -> Reading:
        return Pairs(RowScores())

    def loss(
        self, outputs: Columns, columns: Columns, batch: MiniBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return super().loss({"log_probs": outputs["scores"][..., None]}, columns, batch)


def pairs(number: int = PAIRS) -> DataProto:
    generator = torch.Generator().manual_seed(3)
    side = partial(random_row, generator)
    rows = [PairRow(side(), side(), 0.0) for _ in range(number)]
    return pair_batch(rows, [f"pair {row}" for row in range(number)], pad_token_id=0)


def worker_of(worker: type[RowWorker], one_layer_dir: Path, **data: Any) -> RowWorker:
    config = RowWorkerConfig(
        model=TrainedModelConfig(
            path=str(one_layer_dir / "model"), use_remove_padding=data.pop("packed", True)
        ),
        optim=OptimConfig(lr=1e-2),
        data=RowDataConfig(**data),
    )
    return started(worker, config, 10)


def trained(
    one_layer_dir: Path, worker: type[RowWorker], max_tokens: int = 16384, **data: Any
) -> list[dict[str, float]]:
    role = worker_of(worker, one_layer_dir, max_token_len_per_gpu=max_tokens, **data)
    rows = own_chunk(pairs(), role.rank, role.world_size)
    found = [role.update_model(rows) for _ in range(3)]
    names = ("train/loss", "train/gap", "train/grad_norm")
    return [{name: metrics[name] for name in names} for metrics in found]


@pytest.mark.parametrize("worker", [LikelierWorker, HigherWorker])
def test_neither_cut_nor_padding_nor_ranks_change_an_update(
    worker: type[RowWorker], one_layer_dir: Path
) -> None:
    alone = trained(one_layer_dir, worker)
    assert alone[-1]["train/loss"] < alone[0]["train/loss"]
    others = [
        trained(one_layer_dir, worker, use_dynamic_bsz=False, micro_batch_size_per_gpu=2),
        trained(one_layer_dir, worker, max_tokens=40),
        trained(one_layer_dir, worker, packed=False),
        run_kept(2, trained, one_layer_dir, worker, 30)[1],
    ]
    for other in others:
        for own, expected in zip(other, alone, strict=True):
            assert own == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("apart", [False, True])
def test_each_side_gets_what_the_model_says_of_it_alone(apart: bool, one_layer_dir: Path) -> None:
    batch = pairs()
    role = worker_of(LikelierWorker, one_layer_dir)
    if apart:  # as for models whose rows may not share a pass
        role.engine.row_passes = RowPasses("padded", border=99)
    found = rectangle_of(role.engine.forward_rows(batch, role.budget)["log_probs"])
    assert found.shape == batch.batch["responses"].shape

    model = load_model(role.config.model, "token")
    for pair in range(PAIRS):
        for side in (0, 1):
            row = {name: batch.batch[name][pair, side] for name in INPUTS}
            length = int(row["attention_mask"].sum())
            with torch.no_grad():
                logits = model(row["input_ids"][None, :length]).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, row["responses"][: length - 1, None])[:, 0]
            own = found[pair, side, : length - 1]
            torch.testing.assert_close(
                own, expected * row["response_mask"][: length - 1], atol=2e-5, rtol=1e-4
            )


@pytest.mark.parametrize("score_at", ["last_token", "legacy_mean"])
def test_a_score_is_read_at_real_tokens_alone(score_at: str, one_layer_dir: Path) -> None:
    batch = pairs()
    role = worker_of(HigherWorker, one_layer_dir)
    torch.nn.init.normal_(role.engine.module.score.weight)
    role.engine.reading.of_rows.score_at = score_at
    scores = role.engine.forward_rows(batch, role.budget)["scores"]
    assert scores.shape == (PAIRS, 2)

    body, head = role.engine.module.body, role.engine.module.score
    for pair in range(PAIRS):
        for side in (0, 1):
            length = int(batch.batch["attention_mask"][pair, side].sum())
            with torch.no_grad():
                ids = batch.batch["input_ids"][pair, side, :length][None]
                numbers = head(body(ids).last_hidden_state)[0, :, 0]
            expected = numbers[-1] if score_at == "last_token" else numbers.mean()
            assert float(scores[pair, side]) == pytest.approx(float(expected), rel=1e-4, abs=1e-5)
