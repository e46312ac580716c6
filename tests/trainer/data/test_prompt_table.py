"""Large files of prompts are read and tokenized once; later runs get the same rows and tokens."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from trainer.data import prompt_table, row_cache
from trainer.data.config import DataConfig
from trainer.data.prompt_table import (
    Encoded,
    cached_prompts,
    prompts_in_memory,
)
from trainer.data.prompts import PromptSet, load_tokenizer
from verl_like.files import cache_folder

Row = dict[str, Any]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(row_cache, "ROWS_PER_BLOCK", 3)


def letters(row: Row) -> Encoded:
    """A tokenizer with one token per letter."""
    return row, np.frombuffer(row["prompt"].encode(), dtype=np.uint8).astype(np.int64)


def make_rows(count: int = 8) -> list[Row]:
    return [
        {
            "prompt": f"say {'a' * number}",
            "data_source": "odd" if number % 2 else "even",
            "reward_model": {"ground_truth": number},
            "level": number / 3,
            "text": "line\u2028and \ud800 half a pair",
        }
        for number in range(count)
    ]


class Files:
    """Rows that count how often they are read; the third row is bad."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows, self.num_reads = rows, 0

    def __call__(self) -> Iterator[Encoded | None]:
        self.num_reads += 1
        yield from map(letters, self.rows[:2])
        yield None
        yield from map(letters, self.rows[2:])


def test_a_second_run_reads_the_rows_of_the_first() -> None:
    files = Files(make_rows())
    runs = [cached_prompts("key", files, "prompt") for _ in range(2)]
    assert files.num_reads == 1
    assert runs[0].remembered("digest", lambda: "1") == runs[1].remembered("digest", lambda: "2")
    memory = prompts_in_memory(files, "prompt")
    everything, odd = np.arange(8), np.array([1, 5])
    for cached in runs:
        assert cached is not None
        assert cached.num_bad == memory.num_bad == 1
        assert cached.lengths.tolist() == memory.lengths.tolist()
        for number in (7, 0, 3):
            assert cached.row(number) == memory.row(number)
            assert np.array_equal(cached.tokens(number), memory.tokens(number))
            assert cached.tokens(number).dtype == np.int64
        for rows in (everything, odd):
            assert cached.first_of_sources(rows) == memory.first_of_sources(rows)
        assert cached.first_of_sources(everything) == {"even": 0, "odd": 1}
        assert cached.columns == memory.columns == ["level", "text"]


@pytest.mark.parametrize("name", ["rows.arrow", "summary.json"])
def test_a_damaged_entry_is_written_again(name: str, caplog: pytest.LogCaptureFixture) -> None:
    files = Files(make_rows())
    cached_prompts("key", files, "prompt")
    (entry,) = cache_folder("prompts").iterdir()
    content = (entry / name).read_bytes()
    (entry / name).write_bytes(content[: len(content) // 2])
    cached = cached_prompts("key", files, "prompt")
    assert cached is not None
    assert cached.row(4) == files.rows[4]
    assert files.num_reads == 2
    assert "is damaged and written again" in caplog.text


@pytest.mark.parametrize("value", [b"", ["a", b""], {"a": [b"", "a"]}])
def test_values_that_json_lacks_are_not_cached(value: Any) -> None:
    assert cached_prompts("key", Files([{"prompt": "a", "image": value}] * 3), "prompt") is None
    assert list(cache_folder("prompts").iterdir()) == []


def test_an_error_of_a_row_leaves_no_entry() -> None:
    def read() -> Iterator[Encoded | None]:
        yield from map(letters, make_rows())
        raise ValueError("row 8 is bad")

    with pytest.raises(ValueError, match="row 8 is bad"):
        cached_prompts("key", read, "prompt")
    assert list(cache_folder("prompts").iterdir()) == []


def test_no_cache_without_a_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cache").write_text("a file")
    assert cached_prompts("key", Files(make_rows()), "prompt") is None
    assert "no cache can be written to" in caplog.text


def test_an_unused_entry_is_deleted() -> None:
    cached_prompts("1", Files(make_rows()), "prompt")
    (old,) = cache_folder("prompts").iterdir()
    os.utime(old, (0, 0))
    cached_prompts("2", Files(make_rows()), "prompt")
    assert not old.exists()
    reopened = cached_prompts("2", Files([]), "prompt")
    assert reopened is not None
    assert len(reopened.lengths) == 8


@pytest.mark.parametrize("lost", ["removed", "unwritable"])
def test_values_that_cannot_be_stored_are_computed(
    lost: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cached = cached_prompts("key", Files(make_rows()), "prompt")
    if lost == "removed":
        shutil.rmtree(cache_folder("prompts"))
    else:
        refuse = OSError(errno.EROFS, "Read-only file system")
        monkeypatch.setattr(prompt_table, "write_atomic", Mock(side_effect=refuse))
    assert [cached.remembered("digest", lambda: "1") for _ in range(2)] == ["1", "1"]
    assert "is not stored for later runs" in caplog.text
    assert cached.row(4) == make_rows()[4]


@pytest.mark.parametrize("settings", [{"truncation": "left"}, {"filter_overlong_prompts": True}])
def test_cached_prompts_equal_prompts_in_memory(
    tmp_path: Path, tiny_dir: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows()))
    config = DataConfig(train_files=str(path), train_batch_size=4, max_prompt_length=7, **settings)
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    memory = PromptSet(config, "train_files", tokenizer)
    monkeypatch.setattr(prompt_table, "CACHED_FROM_BYTES", 0)
    for _ in range(2):  # written, then read
        cached = PromptSet(config, "train_files", tokenizer)
        assert cached._table.folder is not None, "read from the cache"
        assert (cached.story, cached.digest) == (memory.story, memory.digest)
        assert cached.first_of_each_source() == memory.first_of_each_source()
        for batch, expected in zip(cached.in_order(), memory.in_order(), strict=True):
            assert torch.equal(batch.batch["input_ids"], expected.batch["input_ids"])
            for name, column in expected.non_tensor_batch.items():
                assert batch.non_tensor_batch[name].tolist() == column.tolist()
