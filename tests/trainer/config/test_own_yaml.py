"""A user's own YAML: it composes, and what is wrong in it is told with the nearest names."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from trainer import main_ppo
from trainer.config.compose import from_composed as compose_checked

GOOD = """
defaults: [ppo_trainer, _self_]
data: {train_files: x}
actor_rollout_ref: {model: {path: y}}
"""


N = "actor_rollout_ref.rollout.n=2"


def said(
    monkeypatch: pytest.MonkeyPatch, folder: Path, files: Mapping[str, str], *arguments: str
) -> str:
    """How `verl-like ppo` with these files ends; a run is only composed."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.setattr("trainer.launch.run", lambda config: None)
    monkeypatch.setattr(sys, "argv", ["verl-like", "--config-dir", str(folder), *arguments])
    try:
        main_ppo.main()
    except SystemExit as ended:
        return str(ended.code)
    return ""


def test_a_good_file_and_a_preset_of_ones_own_compose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def checked(*arguments: object) -> object:
        seen.append(compose_checked(*arguments))
        return seen[-1]

    monkeypatch.setattr(main_ppo, "from_composed", checked)
    own = "# @package _global_\nalgorithm: {adv_estimator: opo}\n"
    files = {"mine.yaml": GOOD, "algorithm/own.yaml": own}
    assert said(monkeypatch, tmp_path, files, "--config-name", "mine", "algorithm=own", N) == ""
    (config,) = seen
    assert (config.data.train_files, config.algorithm.adv_estimator) == ("x", "opo")


def test_a_mistyped_key_in_a_file_is_told_with_the_nearest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"mine.yaml": GOOD.replace("train_files", "tran_files")}
    error = said(monkeypatch, tmp_path, files, "--config-name=mine")
    assert error.startswith("error: In 'mine': There is no key 'data.tran_files'. Did you mean 'da")
    preset = {"algorithm/own.yaml": "# @package _global_\nalgorithm: {adv_estimatr: opo}\n"}
    error = said(monkeypatch, tmp_path, preset, "algorithm=own", "data.train_files=x")
    assert "There is no key 'algorithm.adv_estimatr'. Did you mean 'algorithm.adv_est" in error
    assert "HYDRA_FULL_ERROR" not in error


def test_a_mistyped_file_and_a_folder_that_is_not_there_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = said(monkeypatch, tmp_path, {"mine.yaml": GOOD}, "--config-name", "mien")
    assert error.startswith("error: Cannot find primary config 'mien'.")
    assert error.endswith("Did you mean 'mine'?")
    monkeypatch.setattr(sys, "argv", ["verl-like", "--config-dir", f"{tmp_path}/nowhere"])
    with pytest.raises(SystemExit, match="error: .*nowhere' not found"):
        main_ppo.main()
