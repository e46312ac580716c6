"""Model paths: folders, and names of the hub through its cache; a stand-in is the hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants

from verl_like.errors import ConfigError
from workers.config import ModelConfig
from workers.models.folder import model_folder
from workers.models.load import load_model


@pytest.fixture(autouse=True)
def forget_folders() -> None:
    model_folder.cache_clear()


@pytest.fixture
def cached_model(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a cached model; the hub is unreachable."""
    cached = tmp_path / "hub" / "models--maker--tiny"
    shutil.copytree(tiny_dir / "model", cached / "snapshots" / "1a2b")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("1a2b", encoding="utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return "maker/tiny"


def test_a_cached_model_is_loaded_by_its_name_on_the_hub(cached_model: str, tiny_dir: Path) -> None:
    named = load_model(ModelConfig(path=cached_model), "token").state_dict()
    local = load_model(ModelConfig(path=f"{tiny_dir}/model"), "token").state_dict()
    assert all(torch.equal(named[name], weight) for name, weight in local.items())


def test_a_name_that_is_not_in_the_hub_is_rejected(cached_model: str) -> None:
    with pytest.raises(
        ConfigError,
        match=r"there is no model folder 'maker/other', and the Hugging Face hub",
    ):
        model_folder("maker/other")


def test_a_path_of_a_folder_is_not_looked_up_in_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "runs").mkdir()
    for path in ("runs/mistyped", "nowhere", "some/deeper/path", f"{tmp_path}/nowhere"):
        assert model_folder(path) == Path(path)
    assert model_folder("~/model") == tmp_path / "model"


@pytest.mark.parametrize("stored", ["model.safetensors", "pytorch_model.bin"])
def test_only_the_needed_files_are_fetched(
    stored: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[list[str]] = []

    def fetch(name: str, allow_patterns: list[str]) -> str:
        assert name == "maker/tiny"
        requests.append(allow_patterns)
        if f"*{Path(stored).suffix}" in allow_patterns:
            (tmp_path / stored).touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    model_folder("maker/tiny", weights=False)
    assert list(tmp_path.iterdir()) == []
    assert model_folder("maker/tiny") == tmp_path
    assert (tmp_path / stored).exists()
    assert ["*.bin"] not in requests[:2]
    assert len(requests) == (2 if stored.endswith("safetensors") else 3)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("config.json", "pipe"), ("tokenizer.json", "device"), ("chat_template.jinja", "folder")],
)
def test_a_small_file_that_is_not_a_regular_file_is_rejected(
    name: str, kind: str, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_dir / "model", tmp_path / "model")
    file = folder / name
    file.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with pytest.raises(ConfigError, match=f"{name} is not a regular file"):
        model_folder(str(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b"[" * 100_000),
        ("generation_config.json", b"\xff\xfe"),
        ("tokenizer_config.json", b"[1]"),
        ("config.json", b"{"),
    ],
)
def test_a_damaged_small_file_is_named(
    name: str, content: bytes, tiny_dir: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_dir / "model", tmp_path / "model")
    (folder / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name} is damaged"):
        model_folder(str(folder))


def test_a_giant_among_the_small_files_is_rejected(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ConfigError, match="has 1,073,741,824 bytes, but at most"):
        model_folder(str(tmp_path))
