"""Each kind of process is killed before, within and after a checkpoint, in every recipe, and the
run goes on by itself to the numbers of an undisturbed one.
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
from tests.trainer.detached.test_lost_trainer import of_training
from tests.trainer.recipes.regression import REGRESSION
from trainer import load_config, restarts, run
from trainer.best_of_n.recipe import BEST_OF_N
from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.detached.config import DetachedConfig
from trainer.detached.recipe import DETACHED
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.run_folder import checkpoint
from trainer.sft.recipe import SFT

PLACES = ("before", "within", "after")
TEXTS = [{"prompt": f"say {letter}", "response": letter} for letter in "abcdefg"]
PAIRS = [{"prompt": f"say {letter}", "chosen": letter, "rejected": "z"} for letter in "abcdefg"]
SAVED = ("trainer.backend=local", "trainer.save_freq=1", "trainer.max_restarts=20")
APART = (
    "resource_pool_spec={train_pool: [1], critic_pool: [1], rollout_pool: [1], ref_pool: [1]}",
    "role_mapping={actor: train_pool, critic: critic_pool, rollout: rollout_pool, ref: ref_pool}",
    "trainer.n_gpus_per_node=4",
)
MAKER = (
    *("detached.max_staleness=0", "detached.on_maker_loss=restart"),
    "trainer.max_restarts=3",  # the actor's: a maker's loss is none of the run's
    *POLICY_ALONE,
)
SPLIT = ("placement=split", "trainer.n_gpus_per_node=2")


class Killer:
    """Kills a process around the checkpoint of each step: a role at a place."""

    def __init__(self, roles: Sequence[str]) -> None:
        self.kills = dict(enumerate(product(roles, PLACES), start=1))
        self._trainer: Any = None
        self._own_gather = checkpoint.gather

    def on_step_end(self, trainer: Any, _: object) -> None:
        self._trainer = trainer
        self.kill("before")

    def gather(self, *saves: Any) -> list[Any]:
        """In the place of the one that waits for what roles save, or load."""
        self.kill("within")
        return self._own_gather(*saves)

    def on_save_end(self, trainer: Any, _: object) -> None:
        self.kill("after")

    def kill(self, place: str) -> None:
        step = self._trainer.global_step if self._trainer else 0
        role, its_place = self.kills.get(step, ("", ""))
        if place == its_place:
            del self.kills[step]
            os.kill(self._trainer.groups[role].transport.started[0].pid, signal.SIGKILL)


RECIPES: list[tuple[Recipe[Any], tuple[str, ...], tuple[str, ...]]] = [
    (PPO, APART, ("actor", "rollout", "ref")),
    (PPO, SPLIT, ("actor", "critic")),
    (PPO, ("placement=colocate",), ("actor",)),
    (SFT, (), ("sft",)),
    (REWARD_MODEL, (), ("reward_model",)),
    (DPO, (), ("preference",)),
    (BEST_OF_N, (), ("rollout",)),
    (REGRESSION, SPLIT, ("student", "teacher")),
    (DETACHED, MAKER, ("actor", "rollout")),
]


def settings_of(recipe: Recipe[Any], tiny: Path, folder: Path, *more: str) -> list[str]:
    if recipe in (PPO, DETACHED):
        return overrides(tiny, folder, *FEW_ROWS, *more)
    here = ["trainer.logger=[]", f"trainer.default_local_dir={folder}", *more]
    if recipe is REGRESSION:
        return here
    if recipe is BEST_OF_N:
        prompts = f"data.train_files={tiny}/few.parquet", "data.max_prompt_length=16"
        model = f"actor_rollout_ref.model.path={tiny}/model"
        return [*here, *prompts, model, "data.train_batch_size=16", "data.max_response_length=4"]
    rows = folder.with_suffix(".jsonl")
    rows.write_text("\n".join(map(json.dumps, TEXTS if recipe is SFT else PAIRS)))
    data = f"data.train_files={rows}", "data.train_batch_size=3", "data.max_length=32"
    return [*here, *data, f"model.path={tiny}/model"]


@pytest.mark.parametrize(("recipe", "more", "roles"), RECIPES)
def test_a_run_goes_on_to_the_same_numbers(
    recipe: Recipe[Any],
    more: tuple[str, ...],
    roles: tuple[str, ...],
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killer = Killer(roles)
    more = (*SAVED, *more)
    if recipe is not BEST_OF_N:
        more = (*more, f"trainer.total_training_steps={len(killer.kills) + 1}")
    run(load_config(settings_of(recipe, tiny_dir, tmp_path / "whole", *more), recipe))

    monkeypatch.setattr(restarts, "FIRST_WAIT_S", 0.01)
    monkeypatch.setattr(checkpoint, "gather", killer.gather)
    pools = property(lambda self: frozenset(self.resource_pool_spec))
    for config in (RunConfig, DetachedConfig):
        monkeypatch.setattr(config, "child_pools", pools)
    here = settings_of(recipe, tiny_dir, tmp_path / "killed", *more)
    run(load_config(here, recipe), callbacks=[killer])
    assert not killer.kills, "all came about"
    assert of_training(tmp_path / "killed") == of_training(tmp_path / "whole")
