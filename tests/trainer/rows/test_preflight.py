"""A model is held against the rows' length before a process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.config.compose import load_config
from trainer.rows.preflight import preflight
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_rows_longer_than_a_model_s_positions_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: 16}), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    settings = [f"model.path={tmp_path}", "data.train_files=rows.jsonl"]
    preflight(load_config([*settings, "data.max_length=16"], SFT))
    with pytest.raises(ConfigError, match=r"max_length=17 tokens, .* has 16 positions.*by 1"):
        preflight(load_config([*settings, "data.max_length=17"], SFT))
