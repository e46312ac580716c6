"""The model that a path means: the newest checkpoint of a run, its policy, its settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trainer.run_folder.folder import write_marker
from trainer.run_folder.saved_model import find_saved_model
from verl_like.errors import CheckpointError, DamagedCheckpointError
from workers.training.checkpoints.manifest import NUMBERS, write_manifest

PPO = {
    "actor_rollout_ref.model.path": "policy",
    "actor_rollout_ref.model.lora_rank": 8,
    "critic.model.path": "value",
    "critic.model.lora_rank": 0,
}


def checkpoint(
    folder: Path, step: int, roles: Mapping[str, list[str]], config: Mapping[str, Any]
) -> Path:
    """Create a `global_step_N` with manifests and no tensors."""
    path = folder / f"global_step_{step}"
    for role, contents in roles.items():
        (path / role).mkdir(parents=True)
        write_manifest(
            path / role, {**dict.fromkeys(NUMBERS, 1), "contents": contents, "files": {}}
        )
    marker = {"step": step, "files": {}, "config": config, "inputs": {}, "versions": {}}
    (path / "commit.json").write_text(json.dumps(marker))
    return path


@pytest.fixture
def ppo_run(tmp_path: Path) -> Path:
    roles = {"actor": ["model"], "critic": ["model"]}
    for step in (2, 10):
        checkpoint(tmp_path, step, roles, PPO)
    (tmp_path / "global_step_12").mkdir()  # a save that was interrupted
    return tmp_path


def test_a_run_folder_means_the_policy_of_its_newest_checkpoint(ppo_run: Path) -> None:
    saved = find_saved_model(ppo_run)
    assert saved.folder == ppo_run / "global_step_10" / "actor"
    assert (saved.model.path, saved.model.lora_rank) == ("policy", 8)


@pytest.mark.parametrize(("step", "is_newest"), [(10, True), (9, False)])
def test_the_final_model_is_used_if_it_is_the_newest(
    ppo_run: Path, step: int, is_newest: bool
) -> None:
    marker = json.loads((ppo_run / "global_step_10" / "commit.json").read_text()) | {"step": step}
    (ppo_run / "model").mkdir()
    (ppo_run / "model" / "commit.json").write_text(json.dumps(marker))
    assert (find_saved_model(ppo_run).folder == ppo_run / "model") == is_newest
    assert find_saved_model(ppo_run, role="critic").folder.parent.name == "global_step_10"
    adapter = find_saved_model(ppo_run, in_checkpoint=True)
    assert adapter.folder == ppo_run / "global_step_10" / "actor"


def test_a_role_is_chosen_by_its_folder_or_its_name(ppo_run: Path) -> None:
    by_folder = find_saved_model(ppo_run / "global_step_2" / "critic")
    by_name = find_saved_model(ppo_run / "global_step_2", role="critic")
    assert by_folder == by_name
    assert (by_name.model.path, by_name.model.lora_rank) == ("value", 0)


def test_the_only_role_of_a_recipe_needs_no_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, 1, {"sft": ["model", "optimizer"]}, {"model.path": "base"})
    assert find_saved_model(tmp_path).model.path == "base"


def test_a_path_without_checkpoint_or_role_is_rejected(ppo_run: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is not a folder. Use a run folder"):
        find_saved_model(ppo_run / "nowhere")
    with pytest.raises(CheckpointError, match=r"Use a model folder, a name on the hub .*, a run"):
        find_saved_model(ppo_run / "nowhere", or_model=True)
    with pytest.raises(CheckpointError, match="global_step_12 holds no completed checkpoint"):
        find_saved_model(ppo_run / "global_step_12")
    with pytest.raises(CheckpointError, match="no weights of 'acto'.*Did you mean 'actor'"):
        find_saved_model(ppo_run, role="acto")


def test_the_error_for_the_folder_of_a_sweep_names_its_runs(tmp_path: Path) -> None:
    for job in "01":
        checkpoint(tmp_path / job, 1, {"actor": ["model"]}, PPO)
    with pytest.raises(CheckpointError, match=f"Runs in it: {tmp_path}/0, {tmp_path}/1."):
        find_saved_model(tmp_path)


def test_a_checkpoint_of_several_roles_needs_the_name_of_a_role(tmp_path: Path) -> None:
    roles = {"student": ["model"], "judge": ["model"], "frozen": []}
    checkpoint(tmp_path, 1, roles, {})
    with pytest.raises(CheckpointError, match="weights of judge, student. Choose one with --role"):
        find_saved_model(tmp_path)
    with pytest.raises(CheckpointError, match="which model 'judge' was trained from.*--model"):
        find_saved_model(tmp_path, role="judge")


def test_a_checkpoint_of_an_earlier_version_is_rejected(ppo_run: Path) -> None:
    earlier = {"step": 10, "contents": ["model"], "tensors": {}, "files": {}}
    (ppo_run / "global_step_10" / "actor" / "manifest.json").write_text(json.dumps(earlier))
    with pytest.raises(CheckpointError, match="actor was written by an earlier verl-like.* export"):
        find_saved_model(ppo_run)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda file: file.write_bytes(file.read_bytes()[:-1]),
            "has 7 bytes, but was written with 8",
        ),
        (lambda file: file.write_bytes(b"weight0s"), "has crc32"),
        (Path.unlink, "is missing"),
        (lambda _: None, ""),
    ],
)
def test_exported_models_are_checked(tmp_path: Path, damage: Any, words: str) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"weights!")
    (model / "config.json").write_text("{}")
    write_marker(model, 3, PPO, {})
    damage(model / "model.safetensors")
    (model / "pytorch_model.bin").write_bytes(b"a pickle added later")

    saved, out = find_saved_model(tmp_path), tmp_path / "out"
    if words:
        with pytest.raises(DamagedCheckpointError, match=f"model.safetensors {words}"):
            saved.export(out)
        assert not out.exists()
    else:
        saved.export(out)
        assert {file.name for file in out.iterdir()} == {"config.json", "model.safetensors"}
