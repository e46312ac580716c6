"""Labeled responses: valid rows, errors, and mismatched rows."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from trainer.data.lm_rows import LMRow
from trainer.data.pairs import LabeledRow, labeled_batch, read_labeled
from verl_like.errors import ConfigError

GOOD_ROW = {"prompt": "say a", "completion": "aa", "label": True}
BAD_ROW = {"prompt": "say bb", "response": "xyz", "label": False}
PAIR = {"prompt": "say c", "chosen": "c", "rejected": "d"}


def written(folder: Path, *rows: Any) -> str:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(file)


def prompt_and_response(row: LMRow, tokenizer: Any) -> tuple[str, str]:
    text = tokenizer.decode(row.ids[~row.in_loss])
    return text, tokenizer.decode(row.ids[row.in_loss]).removesuffix(tokenizer.eos_token)


def read(
    tokenizer: Any, folder: Path, *rows: Any, length: int = 32, on_bad_row: str = "error"
) -> list[LabeledRow]:
    files = written(folder, *rows)
    return read_labeled("data.train_files", files, tokenizer, length, 1, on_bad_row)


def test_a_pair_is_a_good_and_a_bad_response(tokenizer: Any, tmp_path: Path) -> None:
    rows = read(tokenizer, tmp_path, GOOD_ROW, BAD_ROW, PAIR)
    assert [row.desirable for row in rows] == [True, False, True, False]
    assert [prompt_and_response(row.response, tokenizer) for row in rows] == [
        ("say a", "aa"),
        ("say bb", "xyz"),
        ("say c", "c"),
        ("say c", "d"),
    ]


def test_a_mismatched_response_is_of_another_prompt(tokenizer: Any, tmp_path: Path) -> None:
    pairs = [
        {"prompt": f"say {letter}", "chosen": f"{letter}1", "rejected": f"{letter}2"}
        for letter in "aabc"
    ]

    def mismatched_of(rows: list[LabeledRow]) -> list[tuple[str, str]]:
        return [prompt_and_response(row.mismatched, tokenizer) for row in rows]

    rows = read(tokenizer, tmp_path, *pairs)
    matched = [prompt_and_response(row.response, tokenizer) for row in rows]
    mismatched = mismatched_of(rows)
    assert [prompt for prompt, _ in mismatched] == [prompt for prompt, _ in matched]
    assert sorted(reply for _, reply in mismatched) == sorted(reply for _, reply in matched)
    assert all(prompt[-1] != reply[0] for prompt, reply in mismatched)
    assert mismatched_of(read(tokenizer, tmp_path, *pairs)) == mismatched

    single = mismatched_of(read(tokenizer, tmp_path, pairs[0]))
    assert single == [("say a", "a2"), ("say a", "a1")]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"label": "yes"}, "'label' is 'yes', neither true nor false"),
        ({"label": None}, "it has neither 'prompt', 'completion' (or 'response') and 'label', nor"),
        ({"chosen": "a", "rejected": "a"}, "are equal"),
    ],
)
def test_a_bad_row_is_rejected_with_its_line(
    change: dict[str, Any], problem: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"rows\.jsonl, line 2: .*{re.escape(problem)}"):
        read(tokenizer, tmp_path, GOOD_ROW, GOOD_ROW | change, BAD_ROW)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"prompt": "a"}, "and 'rejected'; columns: prompt."),
        ({"label": None}, "columns: none. Fix"),
    ],
)
def test_rows_can_be_skipped_only_if_the_first_has_the_columns(
    row: dict[str, Any], problem: str, tokenizer: Any, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tokenizer, tmp_path, row, GOOD_ROW)
    assert problem in str(caught.value)
    assert str(caught.value).endswith("data.on_bad_row=skip.") is ("label" in row)


def test_labels_are_read_from_numbers_and_from_csv(tokenizer: Any, tmp_path: Path) -> None:
    good, bad = GOOD_ROW | {"label": 1}, BAD_ROW | {"label": 0}
    assert [row.desirable for row in read(tokenizer, tmp_path, good, bad)] == [True, False]

    file = tmp_path / "rows.csv"
    file.write_text("prompt,completion,label\nsay a,aa,True\nsay b,xyz,false\n", encoding="utf-8")
    rows = read_labeled("data.train_files", str(file), tokenizer, 32, seed=1)
    assert [row.desirable for row in rows] == [True, False]


def test_rows_with_only_one_label_are_rejected(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"2 responses; .* 2 good and 0 bad responses"):
        read(tokenizer, tmp_path, GOOD_ROW, GOOD_ROW)


def test_truncated_and_dropped_responses_are_counted(
    tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    long = BAD_ROW | {"prompt": "a much longer prompt"}
    with caplog.at_level(logging.INFO, logger="trainer"):
        rows = read(tokenizer, tmp_path, GOOD_ROW, long, BAD_ROW, length=8)
    assert len(rows) == 2
    assert "3 responses; 2 truncated to 8 tokens; 1 dropped" in caplog.text
    assert all(len(row.mismatched.ids) <= 8 and row.mismatched.in_loss.any() for row in rows)


def test_a_batch_marks_desirable_rows(tokenizer: Any, tmp_path: Path) -> None:
    rows = read(tokenizer, tmp_path, GOOD_ROW, BAD_ROW)
    batch = labeled_batch(rows, ["p", "q"], tokenizer.pad_token_id)
    assert batch.batch["desirable"].tolist() == [True, False]
    assert batch.batch["response_mask"].sum(-1).tolist() == [3, 4]
