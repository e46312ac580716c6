"""Samples of a step as lines of a file: every text is read back, and the report shows every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.trainer.report.report_runs import make_run
from trainer.report.page import write_report
from trainer.report.read import read_run
from trainer.rollouts.samples import EXTRA, write_samples
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.files import lines_of, parse_json

TEXTS = ["plain", "half \ud800 a character", "a\u2028b\u2029c\x85d", '日本\n"\\']


def batch_of(texts: list[str]) -> DataProto:
    rows = len(texts)
    ones = torch.ones(rows, 2, dtype=torch.int64)
    return DataProto.from_dict(
        tensors={
            "prompts": ones,
            "responses": ones,
            "attention_mask": torch.ones(rows, 4, dtype=torch.int64),
            "response_mask": ones,
            "token_level_scores": torch.ones(rows, 2),
            "sample_index": torch.zeros(rows, dtype=torch.int64),
        },
        non_tensors={
            "uid": object_rows([str(row) for row in range(rows)]),
            "data_source": object_rows(texts),
            "reward_model": object_rows([{"ground_truth": text} for text in texts]),
            f"{EXTRA}note": object_rows([{text: [text]} for text in texts]),
        },
    )


def test_every_text_of_a_sample_is_read_back(tokenizer: Any, tmp_path: Path) -> None:
    write_samples(tmp_path, 1, batch_of(TEXTS), tokenizer)
    rows = [parse_json(line) for line in lines_of(tmp_path / "1.jsonl")]
    assert [row["gts"] for row in rows] == TEXTS
    assert [row["data_source"] for row in rows] == TEXTS
    assert [row["note"] for row in rows] == [{text: [text]} for text in TEXTS]


def test_the_report_shows_a_row_of_any_text(tokenizer: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", 1)
    write_samples(run / "rollouts", 1, batch_of(TEXTS), tokenizer)
    data = read_run(run)
    assert sorted(sample.truth for sample in data.samples) == sorted(TEXTS)
    assert not data.notes
    assert "half \\ud800 a character" in write_report(run).read_text(encoding="utf-8")
