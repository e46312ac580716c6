"""GSM8K's own JSONL becomes rows that the loader reads and the rule scores."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import load
from tests.trainer.data.prompt_rows import read_rows
from trainer.data.config import DataConfig
from workers.rewards.functions import default_compute_score

LINES = [
    {
        "question": "Ann has 3 pens and buys 4. How many?",
        "answer": "3 + 4 = <<3+4=7>>7 pens.\n#### 7",
    },
    {
        "question": "A car costs 1000 dollars, ten cost?",
        "answer": "10 * 1000 = <<10*1000=10000>>10000\n#### 10,000",
    },
]


def test_rows_are_read_and_scored(tmp_path: Path) -> None:
    prepare = load("examples/data/prepare_gsm8k.py")
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, LINES)), encoding="utf-8")
    path = prepare.convert(tmp_path / "train.jsonl", tmp_path)
    rows, _ = read_rows(DataConfig(train_files=str(path)), "train_files")
    assert [row["reward_model"] for row in rows] == [
        {"style": "rule", "ground_truth": truth} for truth in ("7", "10000")
    ]
    assert rows[0]["prompt"][0]["content"].startswith(LINES[0]["question"])
    assert rows[1]["extra_info"] == {"split": "train", "index": 1, **LINES[1]}
    for row, line in zip(rows, LINES, strict=True):
        truth = row["reward_model"]["ground_truth"]
        assert default_compute_score(row["data_source"], line["answer"], truth) == 1.0


def test_a_line_that_is_not_of_gsm8k_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(
        json.dumps({"question": "?", "answer": "7"}), encoding="utf-8"
    )
    with pytest.raises(
        SystemExit, match=r"x.jsonl, line 1 is not a line of GSM8K: its answer has no ####"
    ):
        load("examples/data/prepare_gsm8k.py").convert(tmp_path / "x.jsonl", tmp_path)


def test_without_files_the_data_set_of_the_hub_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    splits = {"train": LINES, "test": LINES[:1]}
    monkeypatch.setattr("datasets.load_dataset", lambda name, config: splits)
    targets = load("examples/data/prepare_gsm8k.py").fetch(tmp_path)
    rows = {
        path.stem: read_rows(DataConfig(train_files=str(path)), "train_files")[0]
        for path in targets
    }
    assert {split: len(of_split) for split, of_split in rows.items()} == {"train": 2, "test": 1}
    assert rows["test"][0]["extra_info"]["split"] == "test"
