"""Characters that a tokenizer drops are counted and named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from trainer import load_config
from trainer.data.lm_rows import read_lm_rows
from trainer.data.prompts import PromptSet


def byte_pairs(texts: list[str]) -> Any:
    """Return a tokenizer of byte pairs of these texts without an unknown token, as GPT-2's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(special_tokens=["<eos>"]))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture
def file(tmp_path: Path) -> str:
    rows = [{"prompt": "say é", "response": "ab — ab"}, {"prompt": "é a é", "response": "ba\tb"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_dropped_characters_of_rows_are_counted_and_named(
    file: str, caplog: pytest.LogCaptureFixture
) -> None:
    read_lm_rows("data.train_files", file, byte_pairs(["say ab ba"]), 64)
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "data.train_files: the tokenizer of  drops 4 characters" in warning
    assert "'é' (3), '—' (1)" in warning


def test_dropped_characters_of_prompts_are_counted_and_named(
    file: str, tmp_path: Path, tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = load_config(overrides(tiny_dir, tmp_path, f"data.train_files={file}"))
    PromptSet(config.data, "train_files", byte_pairs(["say ab ba"]), needs_rules=False)
    assert "drops 3 characters" in caplog.text
    assert "'é' (3)." in caplog.text


def test_characters_with_a_token_or_an_unknown_token_are_not_reported(
    file: str, tiny_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from trainer.data.prompts import load_tokenizer

    read_lm_rows("data.train_files", file, byte_pairs(["say ab — é"]), 64)
    read_lm_rows("data.train_files", file, load_tokenizer(str(tiny_dir / "model")), 64)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
