"""Rows of large files for SFT, reward models and preferences are tokenized once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from trainer.data import lm_rows, prompt_table, row_cache
from trainer.data.lm_rows import read_lm_rows
from trainer.data.loader import digest_of_rows
from trainer.data.pairs import read_labeled, read_pairs
from trainer.data.prompts import load_tokenizer
from verl_like.files import cache_folder

Row = dict[str, Any]
LM = [{"text": "a" * (number + 1)} for number in range(7)] + [{"prompt": "b", "response": "cd"}]
PAIRS = [
    {"prompt": "ab", "chosen": "c" * (n + 2), "rejected": "d", "margin": n / 3} for n in range(8)
]
LABELED = [{"prompt": f"{n}", "completion": "ab" * n, "label": n % 2} for n in range(1, 7)]
KINDS: dict[str, tuple[Callable[..., list[Any]], list[Row]]] = {
    "lm": (read_lm_rows, LM),
    "pairs": (read_pairs, PAIRS),
    "labeled": (partial(read_labeled, seed=1), LABELED + PAIRS),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every file count as a large one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(row_cache, "ROWS_PER_BLOCK", 3)
    monkeypatch.setattr(prompt_table, "CACHED_FROM_BYTES", 0)


@pytest.fixture
def num_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows that were read from files so far, as a list of one."""
    count, read = [0], lm_rows.rows_of_files

    def rows_of_files(*arguments: Any, **settings: Any) -> Iterator[Any]:
        for row in read(*arguments, **settings):
            count[0] += 1
            yield row

    monkeypatch.setattr(lm_rows, "rows_of_files", rows_of_files)
    return count


def write(folder: Path, rows: list[Row]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_reads_the_rows_of_the_first(
    kind: str, tokenizer: Any, tmp_path: Path, num_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    read_rows, rows = KINDS[kind]
    files = write(tmp_path, [*rows[:4], {"nothing": 1}, *rows[4:]])
    read = partial(read_rows, "data.train_files", files, tokenizer, 8, on_bad_row="skip")
    first, second = read(), read()
    assert num_read == [len(rows) + 1]
    monkeypatch.setattr(prompt_table, "CACHED_FROM_BYTES", 2**30)
    in_memory = read()
    assert num_read == [2 * (len(rows) + 1)]
    assert len(first) > 6
    assert digest_of_rows(first) == digest_of_rows(second) == digest_of_rows(in_memory)


def test_other_inputs_have_new_entries(tiny_dir: Path, tmp_path: Path, num_read: list[int]) -> None:
    tokenizer = load_tokenizer(str(tiny_dir / "model"))
    files = write(tmp_path, LM)

    def read(**settings: Any) -> list[Any]:
        return read_lm_rows("data.train_files", files, tokenizer, 8, **settings)

    ended = read()[0].ids.tolist()
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
    assert read()[0].ids.tolist() == [*ended[:-1], 5]
    tokenizer.chat_template = "{{ messages }}"
    read()
    read(on_bad_row="skip")
    os.utime(files, (0, 0))
    read()
    assert num_read == [5 * len(LM)]
    read(loss_on_all=True)
    assert num_read == [5 * len(LM)], "the entry does not depend on the loss"


def test_pairs_and_labeled_responses_have_different_entries(tokenizer: Any, tmp_path: Path) -> None:
    files = write(tmp_path, PAIRS)
    read_pairs("data.train_files", files, tokenizer, 16)
    assert len(read_labeled("data.train_files", files, tokenizer, 16, seed=1)) == 2 * len(PAIRS)


def test_a_dry_run_writes_no_cache(tokenizer: Any, tmp_path: Path) -> None:
    files = write(tmp_path, LM)
    assert len(read_lm_rows("data.train_files", files, tokenizer, 8, limit=2)) == 2
    assert not cache_folder("rows").exists()
