"""A run folder is private to its user, and holds no secrets."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from trainer.ppo.config import PPOConfig
from trainer.recipe_command import exit_on_error
from trainer.report.page import close_run
from trainer.run_folder.folder import (
    FolderLock,
    note_start,
    open_run_folder,
    saved_config,
    saved_tree,
)
from verl_like import masking
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


def test_new_folders_are_private_and_old_ones_keep_their_mode(config: PPOConfig) -> None:
    folder = opened(config)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert stat.S_IMODE(opened(config).stat().st_mode) == 0o755


def test_a_secret_of_the_configuration_is_in_no_file_of_the_run(
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
def test_a_secret_is_in_no_error_that_ends_a_command(
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


def test_a_configuration_that_is_nested_too_deeply_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("[" * 900)
    with pytest.raises(ConfigError, match="cannot be read as a run's configuration"):
        saved_tree(tmp_path)
