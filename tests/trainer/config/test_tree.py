"""A tree from the kept one and its values is the tree that Hydra composes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from tests.trainer.recipes.regression import REGRESSION, RegressionConfig
from trainer.config import tree
from trainer.config.compose import compose_tree, prepare_overrides, register
from trainer.ppo.recipe import PPO


def of_hydra(overrides: list[str]) -> DictConfig:
    register(PPO)
    with initialize_config_dir(str(PPO.config_dir), version_base="1.3"):
        return compose(PPO.config_name, overrides=overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["data.train_batch_size=48", "actor_rollout_ref.actor.optim.lr=2e-6"],
        ["algorithm=dapo", "placement=split", "algorithm.use_kl_in_reward=false"],
        ["algorithm.gamma=0.5", "algorithm=grpo"],
        ["resource_pool_spec.mine=[1]", "role_mapping.critic=mine", "placement=standalone"],
        ["role_mapping={actor_rollout: a, ref: a}", "resource_pool_spec={a: [2]}"],
        ["trainer.logger=[tensorboard]", "trainer.logger=[]", "data.val_files=null"],
        ["critic={model: {path: x}}", "actor_rollout_ref.model.path='a b'"],
        ["+role_mapping.judge=global_pool", "~role_mapping.critic", "trainer.seed=1"],
        ["trainer.default_local_dir=${trainer.project_name}", "hydra.job.chdir=false"],
        ["++resource_pool_spec.mine=[1,2]"],
    ],
)
def test_the_tree_is_hydras(overrides: list[str]) -> None:
    overrides = prepare_overrides(overrides, PPO)
    theirs = of_hydra(overrides)
    for _ in range(2):  # the first may have been composed, the second comes from what was kept
        ours = compose_tree(overrides, PPO)
        assert OmegaConf.to_yaml(ours) == OmegaConf.to_yaml(theirs)
        assert OmegaConf.get_type(ours, "data") is OmegaConf.get_type(theirs, "data")
        assert OmegaConf.is_struct(ours)


def test_values_are_put_into_a_copy_without_asking_hydra(monkeypatch: pytest.MonkeyPatch) -> None:
    before = OmegaConf.to_yaml(compose_tree([], PPO))
    monkeypatch.setattr(tree, "compose", None)
    changed = compose_tree(["data.train_batch_size=48", "++resource_pool_spec.mine=[1]"], PPO)
    assert changed.data.train_batch_size == 48
    assert OmegaConf.to_yaml(compose_tree([], PPO)) == before


def test_every_tree_is_of_the_schema_where_a_value_left_open_is_its_default() -> None:
    register(PPO)
    for overrides in ([], ["data.train_batch_size=???"], ["trainer.seed=3", "hydra.verbose=true"]):
        ours = compose_tree(overrides, PPO)
        assert OmegaConf.get_type(ours) is PPO.schema
        assert ours.data.train_batch_size == PPO.schema().data.train_batch_size


@pytest.mark.parametrize("override", ["data.train_batch_size=many", "data.tran_files=x"])
def test_a_value_that_does_not_fit_is_refused_in_hydras_words(override: str) -> None:
    register(PPO)
    with pytest.raises(HydraException) as error:
        of_hydra([override])
    with pytest.raises(HydraException) as ours:
        tree.compose_tree_of(PPO, [override])
    assert str(ours.value) == str(error.value)


def test_a_schema_that_cannot_be_imported_is_kept_too() -> None:
    @dataclass
    class OfThisTest(RegressionConfig):
        mine: int = 3

    recipe = replace(REGRESSION, schema=OfThisTest)
    for _ in range(2):
        tree_of_mine = compose_tree(["trainer.seed=5"], recipe)
        assert OmegaConf.get_type(tree_of_mine) is OfThisTest
        assert (tree_of_mine.mine, tree_of_mine.trainer.seed) == (3, 5)


def test_an_edited_yaml_is_read_again(tmp_path: Path) -> None:
    text = (REGRESSION.config_dir / f"{REGRESSION.config_name}.yaml").read_text(encoding="utf-8")
    file = tmp_path / f"{REGRESSION.config_name}.yaml"
    file.write_text(text, encoding="utf-8")
    recipe = replace(REGRESSION, config_dir=tmp_path)
    assert compose_tree([], recipe).trainer.project_name != "mine"

    file.write_text(f"{text}  project_name: mine\n", encoding="utf-8")
    assert compose_tree([], recipe).trainer.project_name == "mine"
