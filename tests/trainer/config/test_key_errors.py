"""A setting with an unknown key or a wrong value is rejected with the valid values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainer import load_config
from trainer.config.compose import known_settings
from trainer.config.key_errors import no_such_key
from trainer.config.show import composed_yaml
from trainer.ppo.recipe import PPO
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError, PlacementError, VerlLikeError

SAMPLED = "actor_rollout_ref.rollout.val_kwargs"
NO_CRITIC = "algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=2"
ERRORS = [
    (
        "data.train_batchsize=8",
        "'data.train_batchsize'. Did you mean 'data.train_batch_size'\\?",
    ),
    ("epochs=3", "there is no key 'epochs'. Did you mean .* or 'trainer.total_epochs'"),
    ("++trainer.sed=3", "there is no key .*Did you mean 'trainer.seed'"),
    ("~trainer.sed", "there is no key .*Did you mean 'trainer.seed'"),
    ("lr=3", "Did you mean 'actor_rollout_ref.actor.optim.lr' or 'critic.optim.lr'"),
    ("placment=split", "there is no key .*Did you mean 'placement'"),
    ("temprature=1", "Did you mean 'actor_rollout_ref.rollout.temperature' or "),
    ("=3", "there is no key ''. All keys"),
    (
        "reward.list={name: a}",
        "'reward.list.name'. reward.list has no keys below it; it takes a list",
    ),
    ("algorithm=3", "algorithm=3: there is no such preset. Known: .*grpo"),
    ("data=a.parquet", "data is a section. Set one of its keys, such as data.train_files"),
    ("trainer.device=gpu", "choose one of auto, cpu, cuda. gpu is called cuda here"),
    ("trainer.seed.step=2", "trainer.seed has no keys below it; it takes a whole number"),
    ("reward_model.sample_timeout_s=1", "no key 'reward_model.sample_timeout_s'.*reward.timeout_s"),
    ("critic.parallel.tpp=2", "no key 'critic.parallel.tpp'.*'critic.parallel.tp'"),
    ("reward.sandbox.memory=1", "no key 'reward.sandbox.memory'.*memory_gib"),
    ("reward.list=[{name:a,weigth:2}]", "an item of reward.list has no key 'weigth'.*'weight'"),
    (f"{NO_CRITIC} critic.optim.lrr=1e-5", "there is no key 'critic.optim.lrr'.*critic.optim.lr"),
    ("~trainer", "^~trainer: this section cannot be removed"),
    ("trainer.stop_at=reward>0.8", "reward>0.8 cannot be read as a setting.*Quote a text"),
    ("trainer.seed", "^trainer.seed is not a setting. Settings are written key=value"),
    ("trainer.seed=1,2", "^trainer.seed=1,2: several values are a sweep. Add --multirun"),
    ("reward.list=[a]", r"^reward.list=\[a\]: it takes a list of sections.$"),
    ("reward.list=[{name: a, weight: x}]", ": weight: it takes a number.$"),
    ("trainer.stop_at=[1]", r"^trainer.stop_at=\[1\]: it takes \{metric: value\}.$"),
    ("trainer.stop_at={reward: high}", r"reward: high\}: it takes \{metric: value\}.$"),
    (
        "trainer.stop_at={reward:0.8}",
        "^trainer.stop_at.reward=0.8: there is no such metric.*critic/score/mean",
    ),
    ("trainer.seed=x", "^trainer.seed=x: it takes a whole number, 0 or more.$"),
    ("trainer.dry_run=yess", "^trainer.dry_run=yess: it takes true, false.$"),
    ("critic.parallel.tp=two", "^critic.parallel.tp=two: it takes a whole number, above 0.$"),
    ("resource_pool_spec.a=x", r"^resource_pool_spec.a=x: .*it takes \{pool: \[processes on each"),
    ("pool_resources.a.gpus=x", "^pool_resources.a.gpus=x: it takes a number, above 0"),
    ("data={train_batch_size: x}", "data.train_batch_size: it takes a whole number, above 0.$"),
    ("role_mapping.actor=null", "^role_mapping.actor=null: role_mapping: it takes role: pool.$"),
    ("trainer.logger=[{a: b}]", "is not a name. Write names.$"),
    ("critic.parallel.pp_schedule=odd", "critic.parallel.pp_schedule=odd: choose one of"),
    (f"{NO_CRITIC} algorithm.kl_ctrl.kl_coef=much", "kl_coef=much.*takes a number"),
    (f"{NO_CRITIC} critic.optim.lr=-1", r"critic.optim.lr=-1: it must be 0 or"),
    ("actor_rollout_ref.actor.optim.lr=nan", "actor.optim.lr=nan: it must be a number"),
    ("actor_rollout_ref.actor.optim.betas=[0.9,1.5]", r"betas=\[0.9, 1.5\].*two numbers"),
    ("critic.optim.lr_warmup_steps_ratio=1.5", "critic.optim.lr_warmup_steps_.*from 0 to 1"),
    (f"{SAMPLED}.do_sample=true {SAMPLED}.top_k=0", f"{SAMPLED}.top_k=0.*above 0, or -1 for all"),
    ("actor_rollout_ref.actor.fsdp_config.fsdp_size=0", "-1 for all that the other axes leave"),
    (
        "critic.model.fsdp_config.fsdp_size=3 trainer.n_gpus_per_node=4",
        "role 'critic' on pool.*fsdp_size=3 does not divide the 4 ranks",
    ),
    (
        "actor_rollout_ref.actor.strategy=single trainer.n_gpus_per_node=2",
        "role 'actor' on pool 'global_pool'.*this pool has 2. Set strategy=ddp or fsdp",
    ),
    ("resource_pool_spec.global_pool=[0]", r"^resource_pool_spec.global_pool=\[0\]: a pool needs"),
    ("trainer.default_local_dir=", "trainer.default_local_dir is empty.*name the folder"),
]


@pytest.mark.parametrize(("settings", "words"), ERRORS, ids=[settings for settings, _ in ERRORS])
def test_errors_name_the_key(settings: str, words: str) -> None:
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
    with pytest.raises(VerlLikeError, match=words):
        load_config([*needed, *re.split(r" (?=[a-z]\w*\.)", settings)])


REFERENCES = [
    ("data.train_batch_size=${data.batch}", r"it refers to \$\{data.batch\}, but there is no such"),
    ("trainer.experiment_name=${mine:1}", r"\$\{mine:...\} is not known. Refer to a key, as in"),
    ("trainer.experiment_name=${oc.env:NOT_SET}", "variable NOT_SET is not set. Set it, or add a"),
    ("trainer.experiment_name='${oops'", r"a reference is not complete. Write it as \$\{KEY\}"),
    ("trainer.seed=${trainer.seed}", "its reference leads back to itself. Set one of the keys"),
    ("trainer.seed=${trainer.cls}", r"of \$\{trainer.cls\} does not fit; it takes a whole number"),
    ("data.train_batch_size=???", "stands for a value that you must set; it takes a whole number"),
    ("algorithm.args={a: ${x}}", r"^algorithm.args.a: it refers to \$\{x\}, but there is no such"),
]
"""A value that OmegaConf rejects late -> our words, which begin with the key."""
OF_OMEGACONF = re.compile("full_key|object_type|nterpolation|andatory|ncompatible|viable")


@pytest.mark.parametrize(("setting", "words"), REFERENCES, ids=[text for text, _ in REFERENCES])
def test_a_reference_that_fails_is_explained_in_our_words(setting: str, words: str) -> None:
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=y"]
    with pytest.raises(ConfigError, match=words) as raised:
        load_config([*needed, setting])
    assert str(raised.value).startswith(setting.partition("=")[0])
    assert not OF_OMEGACONF.search(str(raised.value))


def test_a_configuration_that_cannot_be_printed_is_explained_in_our_words() -> None:
    known = known_settings(["data.train_batch_size=${data.batch}"], PPO)
    with pytest.raises(ConfigError, match="^data.train_batch_size: it refers to"):
        composed_yaml(known, PPO, resolve=True, all_keys=True)


def test_a_yaml_with_an_incomplete_reference_is_explained_in_our_words(tmp_path: Path) -> None:
    text = "defaults: [ppo_trainer, _self_]\ntrainer: {experiment_name: '${oops'}\n"
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match="^trainer.experiment_name: a reference is not complete"):
        load_config([], PPO.with_files_of(tmp_path, "mine"))


def test_a_role_left_on_a_pool_that_is_gone_names_the_role_and_its_way_out() -> None:
    settings = ["resource_pool_spec.mine=[1]", "role_mapping.actor_rollout=mine"]
    settings += ["~resource_pool_spec.global_pool", "algorithm=grpo"]
    words = "role 'ref' is mapped to pool 'global_pool', .*or map .* role_mapping.ref=mine"
    with pytest.raises(PlacementError, match=words):
        load_config(["data.train_files=x", "actor_rollout_ref.model.path=y", *settings])
    with pytest.raises(ConfigError, match=r"role 'ref' is on no pool. Set \+role_mapping.ref="):
        load_config(
            ["data.train_files=x", "actor_rollout_ref.model.path=y", "algorithm=grpo"]
            + ["~role_mapping.ref"]
        )


def test_the_hint_for_recipe_names_a_preset_of_this_recipe() -> None:
    assert no_such_key("recipe", SFT).endswith("chosen by placement, as in placement=split.")
