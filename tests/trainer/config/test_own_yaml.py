"""A user's own YAML composes, and its errors name the nearest valid names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.ppo.recipe import PPO
from trainer.recipe_command import run_command

VALID = """
defaults: [ppo_trainer, _self_]
data: {train_files: x}
actor_rollout_ref: {model: {path: y}}
"""
ErrorOf = Callable[..., str]


@pytest.fixture
def error_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ErrorOf:
    """Return the error of a recipe's command with these files; a run is only composed."""

    def error(
        files: Mapping[str, str], *arguments: str, recipe: Recipe[Any] = PPO, run: Any = bool
    ) -> str:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
        monkeypatch.setattr("trainer.launch.run", run)
        try:
            run_command(recipe, [f"--config-dir={tmp_path}", *arguments])
        except SystemExit as ended:
            return str(ended.code)
        return ""

    return error


def test_files_and_presets_of_the_user_compose(error_of: ErrorOf) -> None:
    configs: list[Any] = []
    preset = "# @package _global_\nalgorithm: {adv_estimator: opo}\n"
    files = {"mine.yaml": VALID, "algorithm/own.yaml": preset}
    settings = ("algorithm=own", "actor_rollout_ref.rollout.n=2")
    assert error_of(files, "--config-name=mine", *settings, run=configs.append) == ""
    (config,) = configs
    assert (config.data.train_files, config.algorithm.adv_estimator) == ("x", "opo")


def test_missing_files_and_folders_are_errors(error_of: ErrorOf) -> None:
    error = error_of({"mine.yaml": VALID}, "--config-name=mien")
    assert error.startswith("error: Cannot find primary config 'mien'.")
    assert error.endswith("Did you mean 'mine'?")
    assert "there is no folder '" in error_of({}, "--config-dir=nowhere")


def test_all_unknown_keys_of_files_are_reported(error_of: ErrorOf) -> None:
    main = """
defaults: [async_trainer, {override algorithm: preset}, _self_]
trainer: {sede: 1, watch: 2}
resource_pool_spec: {my_pool: [1]}
pool_resources: {my_pool: {cpu: 1}}
"""
    preset = "# @package _global_\nalgorithm: {gama: 1, lam: 1}\n"
    files = {"mine.yaml": main, "algorithm/preset.yaml": preset}
    error = error_of(files, "--config-name=mine", recipe=ASYNC)
    keys = {"trainer.sede", "trainer.watch", "pool_resources.my_pool.cpu", "algorithm.gama"}
    assert set(re.findall("there is no key '(.*?)'", error)) == keys
    assert error.startswith("error: In 'algorithm/preset': there is no key 'algorithm.gama'. Did")
    assert "In 'mine': there is no key 'trainer.sede'. Did you mean 'trainer.se" in error
    assert "HYDRA_FULL_ERROR" not in error


def test_invalid_yaml_is_an_error_with_its_line(error_of: ErrorOf) -> None:
    error = error_of({"mine.yaml": "trainer: [1"}, "--config-name=mine")
    assert "mine.yaml is not readable as YAML" in error
    assert "line 1" in error
    error = error_of({"mine.yaml": "- trainer"}, "--config-name=mine")
    assert "'mine' must be a DictConfig, got ListConfig" in error


@pytest.mark.parametrize("arguments", [["--epochs", "3"], ["--epochs=3"], ["epochs"]])
def test_arguments_without_a_key_are_rejected(error_of: ErrorOf, arguments: list[str]) -> None:
    error = error_of({}, *arguments)
    assert f"{arguments[0]} is not a setting. Settings are written key=value" in error


def test_a_key_without_an_equals_sign_needs_a_value(error_of: ErrorOf) -> None:
    for value in ("8", "VALUE"):
        words = ["data.train_batch_size", *([value] if value == "8" else [])]
        assert f"{words[0]} needs a value: {words[0]}={value}" in error_of({}, *words)


@pytest.mark.parametrize("key", ["trainer: {total_epochs: ", "algorithm: {adv_estimator: "])
def test_environment_variables_stay_secret(
    key: str, error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ACCOUNT", "hunter2")
    error = error_of({"mine.yaml": VALID + key + "'${oc.env:MY_ACCOUNT}'}\n"}, "--config-name=mine")
    assert "hunter2" not in error
    assert "${oc.env:MY_ACCOUNT}" in error
