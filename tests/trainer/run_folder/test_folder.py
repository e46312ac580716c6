"""A run folder is private to its user, holds no secrets, and logs its starts."""

from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path

import pytest
import torch

from tests.integration.runs import lines
from trainer.ppo.config import PPOConfig
from trainer.recipe_command import exit_on_error
from trainer.run_folder.folder import (
    FolderLock,
    commit_of_folder,
    note_start,
    open_run_folder,
    saved_config,
    saved_tree,
)
from trainer.tools.report.page import close_run
from verl_like import masking
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError
from verl_like.masking import MASK

SECRET = "hf_0123456789"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PPOConfig:
    secrets: set[str] = set()
    monkeypatch.setattr(masking, "_known", lambda: secrets)
    config = PPOConfig()
    config.trainer.default_local_dir = str(tmp_path / "runs" / "one")
    config.ray.runtime_env = {"env_vars": {"HF_TOKEN": SECRET}}
    return config


def opened(config: PPOConfig) -> Path:
    with FolderLock(config.trainer.default_local_dir) as lock:
        return open_run_folder(config, lock)


def test_only_new_folders_are_made_private(config: PPOConfig) -> None:
    folder = opened(config)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(opened(config).stat().st_mode) == 0o755


def test_no_file_of_the_run_contains_a_secret(
    config: PPOConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = opened(config)
    assert saved_config(folder)["ray.runtime_env.env_vars.HF_TOKEN"] == MASK
    monkeypatch.setattr("sys.orig_argv", ["ppo", f"+ray.runtime_env.env_vars.HF_TOKEN={SECRET}"])
    note_start(folder)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    close_run(folder, ValueError(f"401 for {SECRET}"))
    assert f"401 for {MASK}" in (folder / "failure.txt").read_text()
    for path in folder.rglob("*"):
        assert SECRET not in path.read_text(encoding="utf-8"), path
    assert SECRET not in capsys.readouterr().out


@pytest.mark.parametrize("error", [ConfigError, ValueError])
def test_the_error_that_ends_a_command_contains_no_secret(
    config: PPOConfig, capsys: pytest.CaptureFixture[str], error: type[Exception]
) -> None:
    opened(config)
    failed = error(f"401 for {SECRET}")
    failed.add_note(f"again: 401 for {SECRET}")
    with pytest.raises(SystemExit) as end, exit_on_error("runs"):
        raise failed
    shown = f"{end.value} {capsys.readouterr().err}"
    assert f"401 for {MASK}" in shown
    assert f"\nagain: 401 for {MASK}" in shown.replace("\n  ", "\n")
    assert SECRET not in shown


def test_a_too_deeply_nested_configuration_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("[" * 900)
    with pytest.raises(ConfigError, match="cannot be read as a run's configuration"):
        saved_tree(tmp_path)


def test_starts_are_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.orig_argv", ["verl-like", "ppo", "a=two words"])
    note_start(tmp_path, rows=300)
    monkeypatch.setattr("sys.orig_argv", ["verl-like", "ppo", "a=3"])
    note_start(tmp_path)
    first, second = lines(tmp_path, "starts.jsonl")
    assert first["command"] == "verl-like ppo 'a=two words'"
    assert second["command"] == "verl-like ppo a=3"
    assert torch.__version__.startswith(first["versions"]["torch"].partition("+")[0])
    assert first["host"]
    assert (first["rows"], second["rows"]) == (300, None)


def test_the_commit_of_the_current_folder_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit_of_folder() == ""
    (tmp_path / "reward.py").touch()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    commit = commit_of_folder()
    assert re.fullmatch("[0-9a-f]{12}", commit)
    (tmp_path / "reward.py").write_text("changed")
    assert commit_of_folder() == f"{commit}+"


def test_a_resumed_run_notes_the_keys_that_it_changed(config: PPOConfig) -> None:
    folder = opened(config)
    checkpoint = folder / "global_step_4"
    checkpoint.mkdir()
    (checkpoint / "commit.json").write_text("{}")
    assert opened(config) == folder
    assert not (folder / "changes.jsonl").exists()
    opened(replace_keys(config, {"trainer.save_freq": 7}))
    [change] = lines(folder, "changes.jsonl")
    assert change == {"step": 4, "keys": {"trainer.save_freq": [-1, 7]}}
    opened(replace_keys(config, {"trainer.resume_mode": "disable"}))
    assert not (folder / "changes.jsonl").exists()
