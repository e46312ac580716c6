"""Every process is killed before, during and after a checkpoint; the run recovers to undisturbed
numbers.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, overrides
from tests.trainer.async_training.test_lost_processes import of_training
from tests.trainer.process_backends import BACKENDS, start_processes
from trainer import load_config, recovery, run
from trainer.async_training.recipe import ASYNC
from trainer.config.schema import Recipe
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.run_folder import checkpoint
from trainer.run_folder.checkpoint import Checkpoints
from trainer.sft.recipe import SFT

PLACES = ("before", "within", "as it is written", "after")
PLACES_OF_OTHERS = ("within",)
"""Where the roles after a cell's first one are killed."""
TEXTS = [{"prompt": f"say {letter}", "response": letter} for letter in "abcdefg"]
PAIRS = [{"prompt": f"say {letter}", "chosen": letter, "rejected": "z"} for letter in "abcdefg"]
SAVED = ("trainer.save_freq=1", "trainer.max_restarts=50")
APART = (
    "resource_pool_spec={train_pool: [1], critic_pool: [1], rollout_pool: [1], ref_pool: [1]}",
    "role_mapping={actor: train_pool, critic: critic_pool, rollout: rollout_pool, ref: ref_pool}",
    "trainer.n_gpus_per_node=4",
)
REPLACED = ("async_training.max_staleness=0", "async_training.on_generator_failure=restart")
TWO = ("trainer.n_gpus_per_node=2",)
FOUR = ("trainer.n_gpus_per_node=4",)
REWARDS = "rewards"
"""Instead of a role: the driver's processes that score by a function."""

Cell = tuple[Recipe[Any], tuple[str, ...], tuple[str, ...]]
"""A recipe, its settings, and whose processes are killed, one after the other."""
CELLS: list[Cell] = [
    (PPO, APART, ("rollout", "ref", "critic", REWARDS)),
    (SFT, (), ("sft",)),
    (ASYNC, (*REPLACED, *POLICY_ALONE), ("actor", "rollout")),
]
CLASSIFIER = "CLASSIFIER"
"""In settings: the folder of a reward model."""
SCORED = f"reward.list=[{{name: judge, kind: model, path: {CLASSIFIER}}}]"
WIDE: list[Cell] = [
    (
        PPO,
        (
            "placement=standalone",
            "trainer.n_gpus_per_node=5",
            SCORED,
            "actor_rollout_ref.ref.update_every=2",
        ),
        ("reward_model", "critic", "ref"),
    ),
    (
        ASYNC,
        (*REPLACED, "async_training.score_on=generator", SCORED),
        ("actor", "critic", "rollout"),
    ),
    (PPO, ("placement=split", *FOUR), ("actor/1", "critic/1", REWARDS)),
    (PPO, ("placement=colocate", *TWO), ("actor/1",)),
    (PPO, ("placement=standalone", *FOUR, *POLICY_ALONE), ("actor/1", "rollout/1")),
    (SFT, TWO, ("sft/1",)),
    (REWARD_MODEL, TWO, ("reward_model/1",)),
    (DPO, TWO, ("preference/1",)),
    (
        ASYNC,
        (*REPLACED, *POLICY_ALONE, "async_training.topology=2m2t"),
        ("actor/1", "rollout", "rollout_1", REWARDS),
    ),
]


def describe(cell: Cell) -> str:
    recipe, settings, roles = cell
    (placement,) = [key for key in settings if key.startswith("placement=")] or [""]
    return "-".join([recipe.name, *placement.split("=")[1:], *roles]).replace("/", ":")


def kills_of(roles: Sequence[str]) -> list[tuple[str, str]]:
    """Return each (role, place)."""
    first, *others = roles
    return [*product([first], PLACES), *product(others, PLACES_OF_OTHERS)]


class Killer:
    """Kills processes around the checkpoint of each step: of a role, at a place.

    "actor/1" is the actor's rank 1, "actor" its rank 0.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        self.kills = dict(enumerate(kills_of(roles), start=1))
        self._trainer: Any = None
        self._own_gather, self._own_commit = checkpoint.gather, Checkpoints.commit

    def on_step_end(self, trainer: Any, _: object) -> None:
        self._trainer = trainer
        self.kill("before")

    def gather(self, *saves: Any) -> list[Any]:
        """Replacement of the function that waits for roles to save or load."""
        self.kill("within")
        return self._own_gather(*saves)

    def commit(self, checkpoints: Checkpoints) -> list[Path]:
        """Replacement of the function that lets workers write their copies."""
        committed = self._own_commit(checkpoints)
        self.kill("as it is written")
        return committed

    def on_save_end(self, trainer: Any, _: object) -> None:
        self.kill("after")

    def kill(self, place: str) -> None:
        step = self._trainer.global_step if self._trainer else 0
        role, place_of_kill = self.kills.get(step, ("", ""))
        if place == place_of_kill:
            del self.kills[step]
            pids = self._pids(role)
            assert pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)

    def _pids(self, role: str) -> list[int]:
        if role == REWARDS:
            scorers = [part.manager._scorer for part in self._trainer.rollouts.rewards.parts]
            processes = [process for scorer in scorers for process in scorer._pool.processes]
            supervised = [process.supervised for process in processes]
            pids = [each._process.pid for each in supervised if each is not None]
            return [pid for pid in pids if Path(f"/proc/{pid}").exists()]
        name, _, rank = role.partition("/")
        return [self._trainer.groups[name].transport.started[int(rank or 0)].pid]


def settings_of(cell: Cell, tiny: Path, folder: Path, *more: str) -> list[str]:
    recipe, settings, roles = cell
    more = (*SAVED, *settings, *more)
    more = (f"trainer.total_training_steps={len(kills_of(roles)) + 1}", *more)
    if recipe in (PPO, ASYNC):
        return overrides(tiny, folder, *FEW_ROWS, *more)
    here = ["trainer.logger=[]", f"trainer.default_local_dir={folder}", *more]
    rows = folder.with_suffix(".jsonl")
    rows.write_text("\n".join(map(json.dumps, TEXTS if recipe is SFT else PAIRS)))
    data = f"data.train_files={rows}", "data.train_batch_size=4", "data.max_length=32"
    return [*here, *data, f"model.path={tiny}/model"]


def all_runs() -> list[Any]:
    """Return every cell on each backend; those over 10 s are slow."""
    runs = []
    for cell, backend in product([*CELLS, *WIDE], BACKENDS):
        marks = [pytest.mark.ray] if backend == "ray" else []
        if cell in WIDE or (backend == "ray" and APART[0] in cell[1]):
            marks.append(pytest.mark.slow)
        runs.append(pytest.param(cell, backend, marks=marks, id=f"{describe(cell)}-{backend}"))
    return runs


@pytest.fixture(scope="module")
def undisturbed(
    request: pytest.FixtureRequest,
    tiny_dir: Path,
    classifier: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Cell, Path]:
    """A cell, and the folder of its undisturbed run."""
    recipe, settings, roles = request.param
    cell = recipe, tuple(key.replace(CLASSIFIER, str(classifier)) for key in settings), roles
    folder = tmp_path_factory.mktemp("whole")
    run(load_config(settings_of(cell, tiny_dir, folder, *BACKENDS["local"]), cell[0]))
    return cell, folder


@pytest.mark.long
@pytest.mark.parametrize(("undisturbed", "backend"), all_runs(), indirect=["undisturbed"])
def test_a_run_with_kills_recovers_to_the_same_numbers(
    undisturbed: tuple[Cell, Path],
    backend: str,
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    cell, whole = undisturbed
    recipe, _, roles = cell
    killer = Killer(roles)
    monkeypatch.setattr(recovery, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(checkpoint, "gather", killer.gather)
    monkeypatch.setattr(Checkpoints, "commit", lambda checkpoints: killer.commit(checkpoints))
    start_processes(backend, monkeypatch, request)
    here = settings_of(cell, tiny_dir, tmp_path / "killed", *BACKENDS[backend])
    run(load_config(here, recipe), callbacks=[killer])
    assert not killer.kills, "all happened"
    assert of_training(tmp_path / "killed") == of_training(whole)


def test_a_model_is_written_although_its_writer_is_killed(
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    cell: Cell = (SFT, (), ("sft",))
    write_model, kills = Checkpoints.write_model, ["one kill"]

    def kill_and_write(checkpoints: Checkpoints, step: int, group: Any) -> Path:
        if kills:
            kills.clear()
            group.export_model.remote(str(tmp_path / "elsewhere"))
            os.kill(group.transport.started[0].pid, signal.SIGKILL)
        return write_model(checkpoints, step, group)

    monkeypatch.setattr(recovery, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(Checkpoints, "write_model", kill_and_write)
    start_processes("local", monkeypatch, request)
    one_step = "trainer.total_training_steps=1", *BACKENDS["local"]
    run(load_config(settings_of(cell, tiny_dir, tmp_path / "run", *one_step), SFT))
    assert not kills
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
