"""The list of keys is fixed and documented, and a run shows only the keys that it reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer import load_config
from trainer.async_training.recipe import ASYNC
from trainer.config.keys import config_keys, field_docs, leaf_keys
from trainer.config.schema import Recipe, RunConfig
from trainer.config.show import keys_left_out, without_keys
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from trainer.tools.evaluation.recipe import EVAL

KEYS_FILE = Path(__file__).parent / "ppo_keys.txt"
NEEDED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]


EVERYTHING = [
    *("data.val_files=val.parquet", "trainer.test_freq=5", "trainer.save_freq=5"),
    "actor_rollout_ref.rollout.name=vllm",
]
MAX_KEYS = 168
"""An upper bound on the keys that a run of a recipe shows."""


def size_of_tree(config: RunConfig) -> int:
    """Return the number of keys that a run shows."""
    return len(leaf_keys(type(config))) - len(keys_left_out(config))


def load(*overrides: str) -> PPOConfig:
    return load_config([*NEEDED, *overrides])


def test_the_keys_are_those_of_the_list() -> None:
    names = [key.name for key in leaf_keys(PPOConfig)]
    assert names == KEYS_FILE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("recipe", "needed"),
    [
        *((recipe, NEEDED) for recipe in (PPO, ASYNC)),
        (PPO, [*NEEDED, "algorithm=dapo", *EVERYTHING]),
        *((recipe, ["data.train_files=t", "model.path=m"]) for recipe in (SFT, REWARD_MODEL, DPO)),
        (EVAL, ["data.val_files=val.parquet", "actor_rollout_ref.model.path=model"]),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_every_recipe_shows_few_keys(recipe: Recipe[Any], needed: list[str]) -> None:
    assert size_of_tree(load_config(needed, recipe)) < MAX_KEYS


def test_unread_keys_are_left_out() -> None:
    left_out = keys_left_out(load("algorithm=grpo"))
    assert {"critic.grad_clip", "critic.model.path", "ptx.coef"} <= left_out
    assert "critic.grad_clip" not in keys_left_out(load())
    assert "ptx.coef" not in keys_left_out(load("ptx.train_files=a.jsonl"))


def test_sections_emptied_by_left_out_keys_are_left_out() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "f": {}, "g": {"h": 4}}
    left_out = {"a.c.d", "a.c.e", "g.h"}
    assert without_keys(tree, left_out) == {"a": {"b": 1}, "f": {}}


def test_every_field_has_a_docstring() -> None:
    docs = field_docs(PPOConfig)
    assert [key.name for key in config_keys(PPOConfig) if not docs.get(key.name)] == []


def test_an_uneven_preset_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    load("placement=split", "trainer.n_gpus_per_node=3")
    assert "different numbers of devices" in caplog.text
