"""Pairs in the engine: each side has its own log-probs and scores, and pairs stay together."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.workers.samples import random_row, started
from trainer.data.lm_rows import LMRow
from trainer.data.pairs import PairRow, pair_batch
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import to_padded
from workers.config.rows import RowWorkerConfig, TrainedModelConfig
from workers.models.load import load_model
from workers.roles.rows import SFTWorker
from workers.training.engine import INPUTS
from workers.training.mfu import needed_flops
from workers.training.microbatch import MicroBatchBudget
from workers.training.passes.forward_backward import Reading
from workers.training.passes.packing import PassCounts, RowPasses
from workers.training.row_scores import Pairs, RowScores

PAIRS = 5


class LikelierWorker(SFTWorker):
    """Reads log-probs of both sides."""

    def reading(self) -> Reading:
        return Pairs(Reading())


class HigherWorker(SFTWorker):
    """Reads a score of each side."""

    head = "scalar"

    def reading(self) -> Reading:
        return Pairs(RowScores())


def pairs(number: int = PAIRS) -> DataProto:
    generator = torch.Generator().manual_seed(3)
    side = partial(random_row, generator)
    rows = [PairRow(side(), side(), 0.0) for _ in range(number)]
    return pair_batch(rows, [f"pair {row}" for row in range(number)], pad_token_id=0)


def worker_of(worker: type[SFTWorker], one_layer_dir: Path) -> Any:
    model = TrainedModelConfig(path=str(one_layer_dir / "model"))
    return started(worker, RowWorkerConfig(model=model), 10)


@pytest.mark.parametrize("is_padded", [False, True])
def test_each_side_has_the_log_probs_of_a_single_row(is_padded: bool, one_layer_dir: Path) -> None:
    batch = pairs()
    role = worker_of(LikelierWorker, one_layer_dir)
    if is_padded:  # as for models whose rows may not share a pass
        role.engine.row_passes = RowPasses("padded", border=99)
    log_probs = to_padded(role.engine.forward_rows(batch, role.budget)["log_probs"])
    assert log_probs.shape == batch.batch["responses"].shape

    model = load_model(role.config.model, "token")
    for pair in range(PAIRS):
        for side in (0, 1):
            row = {name: batch.batch[name][pair, side] for name in INPUTS}
            length = int(row["attention_mask"].sum())
            with torch.no_grad():
                logits = model(row["input_ids"][None, :length]).logits[0, :-1]
            expected = logits.log_softmax(-1).gather(1, row["responses"][: length - 1, None])[:, 0]
            torch.testing.assert_close(
                log_probs[pair, side, : length - 1],
                expected * row["response_mask"][: length - 1],
                atol=2e-5,
                rtol=1e-4,
            )


@pytest.mark.parametrize("score_at", ["last_token", "legacy_mean"])
def test_a_score_reads_only_real_tokens(score_at: str, one_layer_dir: Path) -> None:
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


def test_operations_count_the_shared_prompt_of_a_pair_once(one_layer_dir: Path) -> None:
    row = LMRow(np.arange(10, 20), np.arange(10) >= 6)
    batch = pair_batch([PairRow(row, row)], ["pair"], pad_token_id=0)
    engine = worker_of(LikelierWorker, one_layer_dir).engine
    columns = engine.select_rows(batch, (), engine.reading.inputs).columns
    counts = []
    for shares in (True, False):
        engine.row_passes, engine.work = replace(engine.row_passes, shares=shares), PassCounts()
        engine.cut(columns, MicroBatchBudget(rows=1))
        counts.append((engine.work.tokens, needed_flops(engine, trains=True)))
    (shared, few), (separate, many) = counts
    assert separate - shared == 5, "the head is read at the sixth token"
    assert few < many
