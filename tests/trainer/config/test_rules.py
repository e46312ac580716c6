"""The rules of fields are complete, hold for the defaults, and agree with other code."""

from __future__ import annotations

import re
from functools import reduce
from typing import Any, get_origin

import pytest

from trainer.config.checks import check_fields
from trainer.config.compose import known_settings
from trainer.config.keys import Key, leaf_keys, may_change_on_resume
from trainer.config.schema import TRACKERS
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.sft.recipe import SFT
from verl_like.errors import ConfigError
from verl_like.registry import get_registry
from workers.config import KL_ESTIMATORS, LOSS_AGG_MODES, STRATEGIES
from workers.config.model import STRATEGIES_ELSEWHERE

PPO.load_registries()
KEYS = {key.name: key for key in leaf_keys(PPOConfig)}
WITH_RANGE = [key for key in KEYS.values() if key.range]
WITH_UPPER_BOUND = [key for key in WITH_RANGE if {key.rules.at_most, key.rules.below} != {None}]
WITH_NAMES = [key for key in KEYS.values() if key.rules.choices or key.rules.registry]


def config_with(name: str, value: Any) -> PPOConfig:
    """Return a configuration with every required key and this value."""
    config = PPOConfig()
    config.data.train_files, config.actor_rollout_ref.model.path = "train.parquet", "model"
    *sections, leaf = name.split(".")
    setattr(reduce(getattr, sections, config), leaf, value)
    return config


def test_every_key_describes_its_values() -> None:
    assert [name for name, key in KEYS.items() if not key.allowed] == []


def test_the_defaults_satisfy_their_rules() -> None:
    check_fields(config_with("trainer.seed", 1))


@pytest.mark.parametrize("key", WITH_RANGE, ids=lambda key: key.name)
def test_a_number_below_its_range_is_rejected(key: Key) -> None:
    rules = key.rules
    low = rules.above if rules.above is not None else rules.at_least - 1
    with pytest.raises(ConfigError, match=re.escape(f"{key.name}={low}: it must be {key.range}")):
        check_fields(config_with(key.name, low))


@pytest.mark.parametrize("key", WITH_UPPER_BOUND, ids=lambda key: key.name)
def test_a_number_above_its_range_is_rejected(key: Key) -> None:
    rules = key.rules
    high = rules.below if rules.below is not None else rules.at_most + 1
    with pytest.raises(ConfigError, match=re.escape(f"{key.name}={high}: it must be {key.range}")):
        check_fields(config_with(key.name, high))


def takes_anything(*values: object, **named: object) -> None: ...


@pytest.mark.parametrize(
    "name",
    [
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
        "actor_rollout_ref.actor.optim.optimizer",
    ],
)
def test_a_registered_name_or_a_dotted_path_is_accepted(name: str) -> None:
    assert KEYS[name].allowed.endswith(", or a dotted path")
    check_fields(config_with(name, f"{__name__}.takes_anything"))
    with pytest.raises(ConfigError, match=f"{re.escape(name)}=nosuch: unknown .* 'nosuch'"):
        check_fields(config_with(name, "nosuch"))


@pytest.mark.parametrize("key", WITH_NAMES, ids=lambda key: key.name)
def test_a_misspelt_name_is_rejected_with_the_nearest_and_all(key: Key) -> None:
    names = key.rules.choices
    if not names:
        registry = get_registry(key.rules.registry)
        names = tuple(registry.keys() - registry.aliases)
    longest = max(names, key=len)
    misspelt = f"{longest[:-1]}q"
    with pytest.raises(ConfigError) as caught:
        check_fields(
            config_with(key.name, [misspelt] if get_origin(key.kind) is list else misspelt)
        )

    text = str(caught.value)
    assert misspelt in text
    assert [name for name in names if name not in text] == []
    assert repr(longest) in text.partition("Did you mean")[2].partition("?")[0]


def test_a_strategy_of_another_system_is_rejected_with_ours() -> None:
    for word, ours in STRATEGIES_ELSEWHERE.items():
        assert ours in STRATEGIES
        words = f"{word} is called {ours} here."
        with pytest.raises(ConfigError, match=rf"critic\.strategy.*{re.escape(words)}"):
            check_fields(config_with("critic.strategy", word))


def test_special_values_are_accepted() -> None:
    check_fields(config_with("actor_rollout_ref.rollout.top_k", -1))
    check_fields(config_with("trainer.max_ckpt_to_keep", None))
    with pytest.raises(ConfigError, match="top_k=-2: it must be above 0, or -1 for all"):
        check_fields(config_with("actor_rollout_ref.rollout.top_k", -2))


def test_choices_are_the_names_that_the_code_knows() -> None:
    from trainer.run_folder import tracking
    from workers.losses import aggregate, kl

    assert set(LOSS_AGG_MODES) == set(aggregate.AGGREGATIONS)
    assert {name.removesuffix("+") for name in KL_ESTIMATORS} == set(kl.KL_ESTIMATORS)
    assert set(TRACKERS) == set(tracking.BUILT_IN)


def test_only_keys_that_change_no_number_may_change_on_resume() -> None:
    for name in ("ray.address", "role_mapping.critic", "trainer.total_training_steps"):
        assert may_change_on_resume(PPOConfig, name)
    for name in ("actor_rollout_ref.actor.optim.lr", "data.train_files", "trainer.seed"):
        assert not may_change_on_resume(PPOConfig, name)


def test_a_key_by_verl_s_name_is_rejected_with_ours() -> None:
    with pytest.raises(ConfigError, match="Here it is 'trainer.max_ckpt_to_keep'"):
        known_settings(["trainer.max_actor_ckpt_to_keep=1"], SFT)
