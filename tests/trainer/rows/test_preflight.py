"""The length of rows is checked against a model's limit before a process starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.config.compose import load_config
from trainer.preference.recipe import DPO
from trainer.rows.trainer import longest_row, preflight
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError
from workers.roles.rows import PreferenceReferenceWorker, PreferenceWorker


@pytest.fixture(autouse=True)
def no_check_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of these tests have only a length in their configuration."""
    monkeypatch.setattr("trainer.config.checks.check_class_of", lambda role, model: None)


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions"])
def test_rows_longer_than_the_models_positions_are_rejected(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({name: 16}), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    settings = [f"model.path={tmp_path}", "data.train_files=rows.jsonl"]
    preflight(load_config([*settings, "data.max_length=16"], SFT))
    with pytest.raises(ConfigError, match=r"max_length=17: .* has 16 positions.*16 or less"):
        preflight(load_config([*settings, "data.max_length=17"], SFT))


@pytest.mark.parametrize(("positions", "longest"), [(16, 16), (4096, 1024), (None, 1024)])
def test_rows_are_cut_to_the_models_positions(
    positions: int | None, longest: int, tmp_path: Path
) -> None:
    limits = {"max_position_embeddings": positions} if positions else {}
    (tmp_path / "config.json").write_text(json.dumps(limits), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()
    config = load_config([f"model.path={tmp_path}", "data.train_files=rows.jsonl"], SFT)
    assert longest_row(config) == longest
    preflight(config)


def test_a_reference_of_fewer_positions_is_named(tmp_path: Path) -> None:
    for name, positions in (("model", 64), ("ref", 32)):
        (tmp_path / name).mkdir()
        limits = json.dumps({"max_position_embeddings": positions})
        (tmp_path / name / "config.json").write_text(limits, encoding="utf-8")
        (tmp_path / name / "model.safetensors").touch()
    settings = [f"model.path={tmp_path}/model", f"ref.model.path={tmp_path}/ref"]
    config = load_config([*settings, "data.train_files=rows.jsonl"], DPO)
    with pytest.raises(
        ConfigError, match=r"up to 64 tokens, but ref\.model\.path=.* has 32 positions"
    ):
        preflight(config)


@pytest.mark.parametrize("section", ["model", "ref"])
def test_a_sharding_error_of_a_worker_names_the_key(section: str) -> None:
    settings = ["model.path=m", "ref.model.path=r", "data.train_files=rows.jsonl"]
    config = load_config([*settings, f"{section}.fsdp_config.fsdp_size=2"], DPO)
    worker = PreferenceWorker if section == "model" else PreferenceReferenceWorker
    model = worker.role_model(config)
    assert model.axes_key == "parallel"
    with pytest.raises(ConfigError, match=rf"but {section}\.fsdp_config\.fsdp_size=2 shards it"):
        _ = replace(model, strategy="single").sharding


@pytest.mark.parametrize("section", ["model", "ref"])
def test_offloading_on_cpus_is_rejected_for_every_model(section: str, tmp_path: Path) -> None:
    for name in ("model", "ref"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}", encoding="utf-8")
        (tmp_path / name / "model.safetensors").touch()
    settings = [f"model.path={tmp_path}/model", f"ref.model.path={tmp_path}/ref"]
    settings += ["data.train_files=rows.jsonl", f"{section}.fsdp_config.param_offload=true"]
    config = load_config(settings, DPO)
    with pytest.raises(ConfigError, match=f"^{section}.fsdp_config.param_offload=true: .*CPUs"):
        preflight(config)
