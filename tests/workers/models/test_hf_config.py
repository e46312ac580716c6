"""A folder's configuration is parsed once, and every caller gets a copy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import transformers

from verl_like.errors import ConfigError
from workers.models.folder import read_hf_config


@pytest.fixture
def folder(tiny_dir: Path, tmp_path: Path) -> Path:
    shutil.copy(tiny_dir / "model" / "config.json", tmp_path)
    return tmp_path


def test_a_file_is_parsed_once_and_each_caller_gets_a_copy(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = read_hf_config(folder)
    expected = config.to_dict()
    config.attention_dropout += 0.5
    monkeypatch.setattr(transformers, "AutoConfig", None)
    assert read_hf_config(str(folder)).to_dict() == expected


def test_a_changed_file_is_read_again(folder: Path) -> None:
    file = folder / "config.json"
    layers = read_hf_config(folder).num_hidden_layers
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers + 1}))
    assert read_hf_config(folder).num_hidden_layers == layers + 1


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ({"vocab_size": 10**12}, "vocab_size is 1,000,000,000,000"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size is 0"),
    ],
)
def test_impossible_sizes_are_rejected(size: dict[str, object], words: str, folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | size))
    with pytest.raises(ConfigError, match=f"(?s)does not describe a model: .*{words}"):
        read_hf_config(folder)
