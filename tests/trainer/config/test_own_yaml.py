"""A user's own YAML composes, and its errors name the nearest valid names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.async_training.recipe import ASYNC
from trainer.config.recipe import Recipe
from trainer.ppo.recipe import PPO
from trainer.recipe_command import run_command
from trainer.run_folder.folder import saved_config
from verl_like.errors import ConfigError

GOOD = """
defaults: [ppo_trainer, _self_]
data: {train_files: x}
actor_rollout_ref: {model: {path: y}}
"""
BOMB = "a0: &a0 [1, 1]\n" + "".join(
    f"a{number + 1}: &a{number + 1} [{', '.join([f'*a{number}'] * 9)}]\n" for number in range(9)
)

N = "actor_rollout_ref.rollout.n=2"


def said(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    files: Mapping[str, str],
    *arguments: str,
    recipe: Recipe[Any] = PPO,
    run: Any = bool,
) -> str:
    """Return the output of a recipe's command with these files; a run is only composed."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr("trainer.launch.run", run)
    try:
        run_command(recipe, ["--config-dir", str(folder), *arguments])
    except SystemExit as ended:
        return str(ended.code)
    return ""


def test_own_files_and_presets_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    own = "# @package _global_\nalgorithm: {adv_estimator: opo}\n"
    files = {"mine.yaml": GOOD, "algorithm/own.yaml": own}
    arguments = ("--config-name", "mine", "algorithm=own", N)
    assert said(monkeypatch, tmp_path, files, *arguments, run=seen.append) == ""
    (config,) = seen
    assert (config.data.train_files, config.algorithm.adv_estimator) == ("x", "opo")


@pytest.mark.parametrize("bomb", [BOMB, "a: &a [*a]\n"])
def test_alias_bombs_fail(bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = said(monkeypatch, tmp_path, {"mine.yaml": GOOD + bomb}, "--config-name", "mine")
    assert "mine.yaml: its aliases (*name) stand for more than 100,000 values" in text
    (tmp_path / "config.yaml").write_text(bomb)
    with pytest.raises(ConfigError, match="config.yaml: its aliases"):
        saved_config(tmp_path)


def test_a_mistyped_key_gets_the_nearest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"mine.yaml": GOOD.replace("train_files", "tran_files")}
    error = said(monkeypatch, tmp_path, files, "--config-name=mine")
    assert error.startswith("error: In 'mine': there is no key 'data.tran_files'. Did you mean 'da")
    preset = {"algorithm/own.yaml": "# @package _global_\nalgorithm: {adv_estimatr: opo}\n"}
    error = said(monkeypatch, tmp_path, preset, "algorithm=own", "data.train_files=x")
    assert "there is no key 'algorithm.adv_estimatr'. Did you mean 'algorithm.adv_est" in error
    assert "HYDRA_FULL_ERROR" not in error


def test_missing_files_or_folders_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = said(monkeypatch, tmp_path, {"mine.yaml": GOOD}, "--config-name", "mien")
    assert error.startswith("error: Cannot find primary config 'mien'.")
    assert error.endswith("Did you mean 'mine'?")
    assert "there is no folder '" in said(monkeypatch, tmp_path / "nowhere", {})


def test_all_unknown_keys_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main = """
defaults: [async_trainer, {override algorithm: own}, _self_]
trainer: {sede: 1, watch: 2}
resource_pool_spec: {my_pool: [1]}
pool_resources: {my_pool: {cpu: 1}}
"""
    own = "# @package _global_\nalgorithm: {gama: 1, lam: 1}\n"
    files = {"mine.yaml": main, "algorithm/own.yaml": own}
    error = said(monkeypatch, tmp_path, files, "--config-name=mine", recipe=ASYNC)
    keys = {"trainer.sede", "trainer.watch", "pool_resources.my_pool.cpu", "algorithm.gama"}
    assert set(re.findall("there is no key '(.*?)'", error)) == keys
    assert "In 'algorithm/own': there is no key 'algorithm.gama'. Did you mean 'algorit" in error


def test_invalid_yaml_is_told_by_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = said(monkeypatch, tmp_path, {"mine.yaml": "trainer: [1"}, "--config-name", "mine")
    assert "mine.yaml is not readable as YAML" in error
    assert "line 1" in error
    error = said(monkeypatch, tmp_path, {"mine.yaml": "- trainer"}, "--config-name", "mine")
    assert "'mine' must be a DictConfig, got ListConfig" in error


@pytest.mark.parametrize("arguments", [["--epochs", "3"], ["--epochs=3"], ["data.train_files"]])
def test_words_that_are_no_settings_are_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: list[str]
) -> None:
    text = said(monkeypatch, tmp_path, {}, *arguments)
    assert f"{arguments[0]} is not a setting. Settings are written key=value" in text


@pytest.mark.parametrize("key", ["trainer: {total_epochs: ", "algorithm: {adv_estimator: "])
def test_variables_stay_secret(key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MY_ACCOUNT", "hunter2")
    files = {"mine.yaml": GOOD + key + "'${oc.env:MY_ACCOUNT}'}\n"}
    words = said(monkeypatch, tmp_path, files, "--config-dir", str(tmp_path), "--config-name=mine")
    assert "hunter2" not in words
    assert "${oc.env:MY_ACCOUNT}" in words
