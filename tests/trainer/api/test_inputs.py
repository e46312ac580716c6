"""In-memory arguments of a call become files that recipes read; unsupported ones are rejected."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.trainer.data.prompt_rows import read_rows
from trainer.api.inputs import (
    file_names,
    is_file_name,
    model_path,
    place_of_code,
    prompt_row,
    rows_in_memory,
    write_rows,
)
from trainer.data.config import DataConfig
from trainer.data.files import other_columns
from verl_like.errors import ConfigError
from verl_like.registry import load_attribute
from workers.agents.load_environment import Loaded

CHAT = [{"role": "user", "content": "say a"}]


class Dataset:
    """Yields rows as `datasets.Dataset` does: dicts, one by one."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)


@pytest.mark.parametrize(
    "prompts",
    [["say a", "say b"], [CHAT, CHAT], Dataset([{"prompt": "say a", "answer": np.float32(1)}])],
)
def test_prompts_of_every_kind_become_rows_that_ppo_reads(prompts: Any, tmp_path: Path) -> None:
    rows = [prompt_row(item, "prompt") for item in rows_in_memory(prompts, "prompts")]
    path = write_rows(rows, "prompts", tmp_path / "train.jsonl")
    read, _ = read_rows(DataConfig(train_files=path), "train_files")
    expected = [item["prompt"] if isinstance(item, dict) else item for item in prompts]
    assert [row["prompt"] for row in read] == expected


def test_a_ground_truth_moves_to_its_column_and_others_stay() -> None:
    row = prompt_row({"question": "2 + 2", "ground_truth": "4", "level": 1}, "question")
    assert row["reward_model"] == {"ground_truth": "4"}
    assert other_columns([row], "question") == ["level"]


def test_images_are_no_column_of_plain_values() -> None:
    rows = [{"prompt": "p", "level": 1, "image": {"bytes": b""}}, {"prompt": "q", "level": None}]
    assert other_columns(rows, "prompt") == ["level"]


def test_names_of_files_and_data_sets_are_recognized() -> None:
    assert is_file_name("org/dataset")
    assert is_file_name([Path("a.parquet"), "b.jsonl"])
    assert is_file_name(["a.csv", "b.csv"])
    assert not is_file_name(["a.parquet", "say a"])
    assert file_names([Path("a.parquet"), "b.jsonl"]) == ["a.parquet", "b.jsonl"]


def test_a_value_that_json_lacks_is_named_with_its_row(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prompts, row 1: JSON .* b'x', of type bytes\."):
        write_rows([{"prompt": "a"}, {"image": b"x"}], "prompts", tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("data", "words"),
    [([], "is empty"), ({"a": 1}, "dict with the keys a: .*one split"), (3, "has the type int:")],
)
def test_invalid_data_is_rejected(data: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rows_in_memory(data, "prompts")


def test_a_model_in_memory_is_written_with_its_tokenizer(tiny_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir / "model")
    folder = Path(model_path(model, tokenizer, tmp_path / "model"))
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    with pytest.raises(ConfigError, match="Pass the model's tokenizer, too"):
        model_path(model, None, tmp_path)
    with pytest.raises(ConfigError, match="a name on the hub, or a model of transformers"):
        model_path(model.lm_head, tokenizer, tmp_path)
    model.merge_and_unload = None  # as models of peft have it
    with pytest.raises(ConfigError, match=r"Pass model\.merge_and_unload\(\)"):
        model_path(model, tokenizer, tmp_path)
    with pytest.raises(ConfigError, match="is the one in its folder"):
        model_path("gpt2", tokenizer, tmp_path)


CELL = '''
from __future__ import annotations
from typing import Literal
from verl_like import Environment

class Rooms(Environment):
    def look(self, where: Literal["left", "right"], times: int = 1) -> str:
        """Look there."""
'''


def test_types_that_only_annotations_name_come_along_with_a_class(tmp_path: Path) -> None:
    cell: dict[str, Any] = {"__name__": "__main__"}
    exec(CELL, cell)
    file, name = place_of_code(cell["Rooms"], tmp_path / "code", "Rooms")
    loaded = load_attribute(file, name, "environment", "environment")
    (tool,) = Loaded(loaded, {}, []).tools
    assert tool.schema["function"]["parameters"]["properties"]["where"]["enum"] == ["left", "right"]
