"""The number of threads per process: chosen at the start, and kept with the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.run_folder.checkpoints import saved
from trainer import load_config, threads
from trainer.async_training.recipe import ASYNC
from trainer.config.keys import flat_config
from trainer.config.schema import RunConfig
from trainer.ppo.recipe import PPO
from trainer.run_folder.folder import CONFIG_FILE, MARKER, THREADS
from trainer.run_folder.resume import ResumePoint
from trainer.sft.recipe import SFT
from trainer.threads import describe_threads, largest_model, processes_per_node, with_threads
from trainer.tools.evaluation.recipe import EVAL
from verl_like.config_key import replace_keys
from verl_like.errors import CheckpointError


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "usable_cores", lambda: 8)
    monkeypatch.setattr(threads, "largest_model", lambda config: threads.MIN_WEIGHTS)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


def config_of(*settings: str, recipe: Any = PPO) -> RunConfig:
    model = "model" if recipe is SFT else "actor_rollout_ref.model"
    rows = "val" if recipe is EVAL else "train"
    needed = [f"data.{rows}_files=x", f"{model}.path=x", "trainer.device=cpu"]
    return load_config([*needed, *settings], recipe)


LOCAL = "trainer.backend=local"


@pytest.mark.parametrize(
    ("settings", "processes"),
    [
        ([], 1),
        (["trainer.n_gpus_per_node=3"], 3),
        ([LOCAL, "placement=split", "trainer.n_gpus_per_node=2"], 1),  # both in the driver
        ([LOCAL, "placement=split", "trainer.n_gpus_per_node=3"], 3),
        (["trainer.nnodes=2", "trainer.n_gpus_per_node=4"], 4),
    ],
)
def test_the_cores_are_divided_by_the_processes_of_a_node(
    settings: list[str], processes: int
) -> None:
    config = config_of("algorithm.adv_estimator=gae", *settings)
    assert processes_per_node(config) == processes
    assert with_threads(config).trainer.threads_per_process == 8 // processes


def test_generators_and_trainers_share_the_cores() -> None:
    config = config_of("async_training.generators=3", "trainer.backend=local", recipe=ASYNC)
    assert with_threads(config).trainer.threads_per_process == 2


def test_a_small_model_gets_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "largest_model", lambda config: threads.MIN_WEIGHTS - 1)
    assert with_threads(config_of()).trainer.threads_per_process == 1


@pytest.mark.parametrize("recipe", [PPO, SFT, EVAL])
def test_the_largest_model_is_counted_without_its_weights(
    tmp_path: Path, tiny_dir: Path, recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_dir / "model")
    settings = [f"{key}={tiny_dir}/model" for key in ("actor_rollout_ref.model.path",)]
    if recipe is SFT:
        settings = [f"model.path={tiny_dir}/model"]
    assert largest_model(config_of(*settings, recipe=recipe)) == model.num_parameters()
    assert largest_model(config_of(recipe=recipe)) == 0  # the checks report that it is missing


def test_the_users_numbers_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert with_threads(config_of()).trainer.threads_per_process == 3
    config = with_threads(config_of("trainer.threads_per_process=16"))
    assert config.trainer.threads_per_process == 16
    assert describe_threads(config) == (
        "Threads: 16 per process (3 cores, 1 process); more threads than cores make steps slower, "
        "but change no number"
    )


def run_of(folder: Path, number: int | None) -> None:
    """Leave the folder of a run with a checkpoint; None: of a version without the key."""
    set_to = "null" if number is None else number
    saved(folder, 2, overrides=(f"trainer.threads_per_process={set_to}",))
    marker = folder / "global_step_2" / MARKER
    content = json.loads(marker.read_text())
    (folder / CONFIG_FILE).write_text(f"trainer: {{threads_per_process: {number}}}\n")
    if number is None:
        del content["config"][THREADS]
        (folder / CONFIG_FILE).write_text("trainer: {seed: 1}\n")
    marker.write_text(json.dumps(content))


@pytest.mark.parametrize(("number", "expected"), [(4, 4), (None, 1)])
@pytest.mark.parametrize("mode", ["auto", "resume_path"])
def test_a_resumed_run_keeps_its_number(
    tmp_path: Path, mode: str, number: int | None, expected: int
) -> None:
    run_of(tmp_path, number)
    config = replace_keys(config_of(), {"trainer.default_local_dir": str(tmp_path)})
    if mode == "resume_path":
        start = {"trainer.resume_from_path": str(tmp_path / "global_step_2")}
        other = {"trainer.resume_mode": mode, "trainer.default_local_dir": str(tmp_path / "other")}
        config = replace_keys(config, start | other)
    assert with_threads(config).trainer.threads_per_process == expected
    new = replace_keys(config, {"trainer.resume_mode": "disable"})
    assert with_threads(new).trainer.threads_per_process == 8


def test_another_number_is_another_configuration(tmp_path: Path) -> None:
    run_of(tmp_path, None)
    config = config_of("trainer.threads_per_process=2", "trainer.save_freq=2")
    config = replace_keys(config, {"trainer.default_local_dir": str(tmp_path)})
    with pytest.raises(CheckpointError, match="trainer.threads_per_process was 1, is 2"):
        ResumePoint(config)


def test_the_run_folder_of_a_run_has_its_number() -> None:
    assert flat_config(with_threads(config_of()))[THREADS] == 8
