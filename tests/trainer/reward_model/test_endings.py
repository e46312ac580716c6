"""Pairs end like samples: with a stop token, and nothing after it."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from trainer.data.pairs import PairRow, read_pairs
from trainer.reward_model.step import end_as_samples_do

OWN_ENDING = "{{ eos_token if message.role == 'assistant' }}"
"""The end of an assistant's turn in the tiny model's template."""
QUESTION = {"role": "user", "content": "say a"}
TEXTS = {"prompt": "say a", "chosen": "aa", "rejected": "bb"}


def with_ending(tokenizer: Any, ending: str) -> Any:
    """Return the tokenizer with a template that writes this after an assistant's text."""
    changed = copy.deepcopy(tokenizer)
    content = "{{ message.content }}"
    ended = f"{content}{{{{ '{ending}' if message.role == 'assistant' else '' }}}}"
    plain = tokenizer.chat_template.replace(OWN_ENDING, "")
    changed.chat_template = plain.replace(content, ended)
    return changed


def read(tokenizer: Any, tiny_dir: Path, file: Path, row: dict[str, Any], length: int = 32) -> Any:
    file.write_text(json.dumps(row), encoding="utf-8")
    rows = read_pairs("data.train_files", str(file), tokenizer, length)
    return end_as_samples_do("data.train_files", rows, tokenizer, str(tiny_dir / "model"), length)


def chats() -> dict[str, Any]:
    return {
        side: [QUESTION, {"role": "assistant", "content": text}]
        for side, text in (("chosen", "aa"), ("rejected", "bb"))
    }


def ends(rows: list[PairRow], tokenizer: Any) -> list[str]:
    sides = [side for row in rows for side in (row.chosen, row.rejected)]
    return [tokenizer.decode(side.ids[side.in_loss]) for side in sides]


def test_whitespace_after_the_stop_token_is_removed(
    tokenizer: Any, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = with_ending(tokenizer, r"<eos>\n")
    rows = read(changed, tiny_dir, tmp_path / "pairs.jsonl", chats())
    assert ends(rows, tokenizer) == ["aa<eos>", "bb<eos>"]
    rows = read(tokenizer, tiny_dir, tmp_path / "pairs.jsonl", TEXTS)
    assert ends(rows, tokenizer) == ["aa<eos>", "bb<eos>"]
    assert "stop token" not in caplog.text


def test_a_template_without_a_stop_token_gets_a_warning(
    tokenizer: Any, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changed = with_ending(tokenizer, "")
    with caplog.at_level(logging.WARNING, logger="trainer"):
        rows = read(changed, tiny_dir, tmp_path / "pairs.jsonl", chats())
    assert ends(rows, tokenizer) == ["aa", "bb"]
    assert "2 of 2 responses do not end with a stop token (<eos>)" in caplog.text


def test_truncated_sides_are_not_counted(
    tokenizer: Any, tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(tokenizer, tiny_dir, tmp_path / "pairs.jsonl", TEXTS, length=7)
    assert "stop token" not in caplog.text
