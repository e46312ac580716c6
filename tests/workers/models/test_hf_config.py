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


def test_what_one_reader_changes_the_next_does_not_see(folder: Path) -> None:
    first = read_hf_config(folder)
    kept = first.attention_dropout
    first.attention_dropout = kept + 0.5
    assert read_hf_config(folder).attention_dropout == kept


def test_the_same_file_is_parsed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read_hf_config(folder)
    monkeypatch.setattr(transformers, "AutoConfig", None)
    assert read_hf_config(str(folder)).to_dict() == first.to_dict()


def test_a_file_that_was_written_anew_is_read_anew(folder: Path) -> None:
    file = folder / "config.json"
    layers = read_hf_config(folder).num_hidden_layers
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_hidden_layers": layers + 1}))
    assert read_hf_config(folder).num_hidden_layers == layers + 1


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ({"vocab_size": 10**12}, "vocab_size is 1,000,000,000,000"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0"),
        ({"hidden_size": "x"}, "hidden_size"),
        ({"text_config": {"hidden_size": 0}}, "hidden_size is 0"),
    ],
)
def test_sizes_that_no_model_has_are_refused(
    size: dict[str, object], said: str, folder: Path
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | size))
    with pytest.raises(ConfigError, match=f"(?s)does not describe a model: .*{said}"):
        read_hf_config(folder)
