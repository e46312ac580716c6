"""Every YAML composes, the list of keys is fixed, and an unknown key gets the nearest ones."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import pytest

from trainer import load_config
from trainer.async_training.recipe import ASYNC
from trainer.best_of_n.recipe import BEST_OF_N
from trainer.config.compose import known_settings
from trainer.config.keys import config_keys, leaf_keys
from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.config.unused_keys import keys_left_out, without_keys
from trainer.evaluation.recipe import EVAL
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.preference.recipe import DPO
from trainer.reward_model.recipe import REWARD_MODEL
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError

KEYS_FILE = Path(__file__).parent / "ppo_keys.txt"
NEEDED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]


EVERYTHING = [
    *("data.val_files=val.parquet", "trainer.test_freq=5", "trainer.save_freq=5"),
    "actor_rollout_ref.rollout.name=vllm",
]
MOST_KEYS = 166
"""Of a recipe, in the tree of a run."""


def leaves() -> list[str]:
    return [key.name for key in leaf_keys(PPOConfig)]


def size_of_tree(config: RunConfig) -> int:
    """Return the number of keys in the tree of a run."""
    return len(leaf_keys(type(config))) - len(keys_left_out(config))


def load(*overrides: str) -> PPOConfig:
    return load_config([*NEEDED, *overrides])


def test_the_keys_are_the_frozen_ones() -> None:
    assert leaves() == KEYS_FILE.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(
    ("recipe", "needed"),
    [
        *((recipe, NEEDED) for recipe in (PPO, ASYNC, BEST_OF_N)),
        (PPO, [*NEEDED, "algorithm=dapo", *EVERYTHING]),
        *((recipe, ["data.train_files=t", "model.path=m"]) for recipe in (SFT, REWARD_MODEL, DPO)),
        (EVAL, ["data.val_files=val.parquet", "actor_rollout_ref.model.path=model"]),
    ],
    ids=lambda value: value.name if isinstance(value, Recipe) else "",
)
def test_the_tree_of_every_recipe_has_few_keys(recipe: Recipe[Any], needed: list[str]) -> None:
    assert size_of_tree(load_config(needed, recipe)) < MOST_KEYS


def test_what_nothing_reads_is_left_out() -> None:
    left_out = keys_left_out(load("algorithm=grpo"))
    assert {"critic.grad_clip", "critic.model.path", "ptx.coef"} <= left_out
    assert "critic.grad_clip" not in keys_left_out(load())
    assert "ptx.coef" not in keys_left_out(load("ptx.train_files=a.jsonl"))


def test_a_tree_without_keys_has_no_empty_sections_but_those_that_were_empty() -> None:
    tree = {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "f": {}, "g": {"h": 4}}
    left_out = {"a.c.d", "a.c.e", "g.h"}
    assert without_keys(tree, left_out) == {"a": {"b": 1}, "f": {}}


def test_every_field_has_a_docstring() -> None:
    sections = [key.kind for key in config_keys(PPOConfig) if key.is_section]
    for schema in {PPOConfig, RunConfig, *sections}:
        assert undocumented(schema) == [], schema


def undocumented(schema: type) -> list[str]:
    """Return fields without a docstring below them."""
    body = ast.parse(inspect.getsource(schema)).body[0].body
    fields = [place for place, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    following = [*body[1:], None]
    return [ast.unparse(body[place].target) for place in fields if not is_string(following[place])]


def is_string(node: ast.stmt | None) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def test_an_uneven_preset_says_so(caplog: pytest.LogCaptureFixture) -> None:
    load("placement=split", "trainer.n_gpus_per_node=3")
    assert "different numbers of devices" in caplog.text


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("++trainer.sed=3", "Did you mean 'trainer.seed'"),
        ("~trainer.sed", "Did you mean 'trainer.seed'"),
        ("lr=3", "Did you mean 'actor_rollout_ref.actor.optim.lr' or 'critic.optim.lr'"),
        ("placment=split", "Did you mean 'placement'"),
    ],
)
def test_an_unknown_key_gets_the_nearest_ones(override: str, answer: str) -> None:
    with pytest.raises(ConfigError, match="there is no key") as caught:
        known_settings([override], PPO)
    assert answer in str(caught.value)
