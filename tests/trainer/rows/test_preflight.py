"""A model's limits are checked against the rows' length before a process starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.config.compose import load_config
from trainer.preference.recipe import DPO
from trainer.rows.preflight import longest_row, preflight
from trainer.sft.recipe import SFT, SFTConfig
from verl_like.errors import ConfigError


def checked(config: SFTConfig) -> None:
    preflight(config, num_sides=1)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_rows_longer_than_a_model_s_positions_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: 16}), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    settings = [f"model.path={tmp_path}", "data.train_files=rows.jsonl"]
    checked(load_config([*settings, "data.max_length=16"], SFT))
    with pytest.raises(ConfigError, match=r"max_length=17 tokens, .* has 16 positions.*by 1"):
        checked(load_config([*settings, "data.max_length=17"], SFT))


@pytest.mark.parametrize(("positions", "longest"), [(16, 16), (4096, 1024), (None, 1024)])
def test_rows_are_cut_to_the_model(positions: int | None, longest: int, tmp_path: Path) -> None:
    described = {"max_position_embeddings": positions} if positions else {}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    config = load_config([f"model.path={tmp_path}", "data.train_files=rows.jsonl"], SFT)
    assert longest_row(config) == longest
    checked(config)


def test_a_reference_of_fewer_positions_is_named(tmp_path: Path) -> None:
    for name, positions in (("model", 64), ("ref", 32)):
        (tmp_path / name).mkdir()
        described = json.dumps({"max_position_embeddings": positions})
        (tmp_path / name / "config.json").write_text(described, encoding="utf-8")
        (tmp_path / name / "model.safetensors").touch()
    settings = [f"model.path={tmp_path}/model", f"ref.model.path={tmp_path}/ref"]
    config = load_config([*settings, "data.train_files=rows.jsonl"], DPO)
    with pytest.raises(ConfigError, match=r"=64 tokens, but ref\.model\.path=.* has 32 positions"):
        preflight(config, num_sides=2)
