"""Samples of a step as lines of a file, of which the best and the worst are kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.trainer.tools.report.report_runs import make_run
from trainer.ppo.config import PPOConfig
from trainer.rollouts import rollouts
from trainer.rollouts.rollouts import Rollouts
from trainer.rollouts.samples import BYTES_OF_OLD_STEP, EXTRA, thin_samples, write_samples
from trainer.tools.report.page import write_report
from trainer.tools.report.read import read_run
from verl_like.batch.columns import object_rows
from verl_like.batch.protocol import DataProto
from verl_like.files import parse_json, text_lines

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
    rows = [parse_json(line) for line in text_lines(tmp_path / "1.jsonl")]
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


def written(path: Path, scores: list[float], length: int = 100) -> list[bytes]:
    rows = [json.dumps({"sample": i, "score": s, "output": "é" * length}) for i, s in
            enumerate(scores)]  # fmt: skip
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    return path.read_bytes().splitlines(keepends=True)


def test_a_file_within_the_limit_stays_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    written(path, [1.0, 2.0, 3.0])
    before = path.read_bytes()
    thin_samples(path)
    assert path.read_bytes() == before
    thin_samples(tmp_path / "absent.jsonl")


def test_the_best_and_the_worst_sample_stay_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "1.jsonl"
    lines = written(path, [1.0, 3.0, 0.0, 2.0], length=5000)
    thin_samples(path)
    assert path.read_bytes() == lines[1] + lines[2]
    written(path, [1.0], length=5000)
    thin_samples(path)
    assert len(path.read_bytes().splitlines()) == 1


def test_files_of_new_steps_stay_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "write_samples", lambda *_: None)
    run = SimpleNamespace(folder=tmp_path, step=9)
    trainer: Any = SimpleNamespace(run=run, config=PPOConfig())
    rewards: Any = SimpleNamespace(columns_read=lambda _: [])
    samples = Rollouts(trainer, None, rewards)
    for folder, numbers in (("rollouts", (7, 8, 9)), ("validation", (0, 3, 6, 9))):
        (tmp_path / folder).mkdir()
        for step in numbers:
            written(tmp_path / folder / f"{step}.jsonl", [0.0] * 100)

    def whole(folder: str) -> list[int]:
        files = (tmp_path / folder).glob("*.jsonl")
        return sorted(int(f.stem) for f in files if f.stat().st_size > BYTES_OF_OLD_STEP)

    for keep, steps, validations in (
        (None, [7, 8, 9], [0, 3, 6, 9]),
        (10, [7, 8, 9], [0, 3, 6, 9]),
        (4, [7, 8, 9], [6, 9]),
        (1, [7, 9], [9]),
    ):
        trainer.config.trainer.rollout_steps_to_keep = keep
        samples.write("rollouts", None)  # type: ignore[arg-type]
        samples.write("validation", None)  # type: ignore[arg-type]
        assert whole("rollouts") == steps, "one step per write"
        assert whole("validation") == validations
