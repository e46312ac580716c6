"""The inputs of a run: their digests, and the changes that a resume rejects."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.trainer.run_folder.checkpoints import checkpoints, resume_from, saved
from trainer.config.user_modules import imported_files
from trainer.run_folder import folder as run_folder
from trainer.run_folder import resume
from trainer.run_folder.resume import digest
from verl_like.errors import CheckpointError


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Data, reward code, and a model folder."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text("1\n2\n")
    (tmp_path / "reward.py").write_text("def compute_score(): return 1")
    return {
        "data.train_files": tmp_path / "data.jsonl",
        "reward.function.path": tmp_path / "reward.py",
        "critic.model.path": folder,
    }


def overrides(files: dict[str, Path]) -> tuple[str, ...]:
    return tuple(f"{key}={path}" for key, path in files.items())


@pytest.mark.parametrize("key", ["data.train_files", "reward.function.path"])
def test_a_changed_file_is_named_by_its_key(
    files: dict[str, Path], key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    saved(run, 2, overrides=overrides(files))
    assert checkpoints(run, *overrides(files)).resume.start_step == 2
    files[key].write_text(files[key].read_text()[::-1])
    words = f"{key}: {files[key]} has other contents now"
    with pytest.raises(CheckpointError, match=words):
        checkpoints(run, *overrides(files))
    chosen = checkpoints(run, *overrides(files), *resume_from(run / "global_step_2"))
    assert chosen.resume.start_step == 2
    assert words in caplog.text


IMPORTED = {
    "base/terms.py": "from parts import deep\nfrom torch import nn",
    "base/parts/__init__.py": "",
    "base/parts/deep.py": "from . import deeper",
    "base/parts/deeper.py": "import terms",
    "beside.py": "import json, no_such_module",
}


@pytest.mark.parametrize("changed", IMPORTED)
def test_a_changed_module_that_a_reward_imports_is_rejected(
    files: dict[str, Path], changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base" / "parts").mkdir(parents=True)
    for name, content in IMPORTED.items():
        (tmp_path / name).write_text(content)
    monkeypatch.syspath_prepend(tmp_path / "base")
    reward = files["reward.function.path"]
    reward.write_text("import sys, beside\ndef compute_score():\n    import terms\n    return 1")
    run = tmp_path / "run"
    saved(run, 2, overrides=overrides(files))
    assert checkpoints(run, *overrides(files)).resume.start_step == 2
    assert {path.relative_to(tmp_path).as_posix() for path in imported_files(reward)} == {*IMPORTED}

    (tmp_path / changed).write_text("changed = True")
    words = f"function.path: {changed}, which {reward} imports, has other contents now"
    with pytest.raises(CheckpointError, match=words):
        checkpoints(run, *overrides(files))


def test_a_changed_model_folder_is_rejected(files: dict[str, Path], tmp_path: Path) -> None:
    run, model = tmp_path / "run", files["critic.model.path"]
    saved(run, 2, overrides=overrides(files))
    (model / ".cache").mkdir()
    (model / ".cache" / "x").touch()
    assert checkpoints(run, *overrides(files)).resume.start_step == 2
    (model / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="critic.model.path: .*/model has other contents now"):
        checkpoints(run, *overrides(files))


def test_other_versions_get_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 2)
    versions = run_folder.installed_versions() | {"torch": "9.9"}
    monkeypatch.setattr("trainer.run_folder.resume.installed_versions", lambda: versions)
    with caplog.at_level(logging.WARNING):
        assert checkpoints(tmp_path).resume.start_step == 2
    assert "but 9.9 is installed: numbers may differ" in caplog.text


def test_large_files_are_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "WHOLE_BYTES", 100)
    monkeypatch.setattr(resume, "BLOCK_BYTES", 8)
    path = tmp_path / "weights"
    digests = set()
    for place in (None, 0, 499, 999):
        content = bytearray(1000)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        digests.add(digest(path))
    path.write_bytes(bytes(1001))
    digests.add(digest(path))
    assert len(digests) >= 4, "all except a change between two blocks"
    os.truncate(path, 0)
    assert digest(path) not in digests
