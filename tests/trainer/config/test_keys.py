"""Every YAML composes, the list of keys is frozen, and an unknown key gets the nearest ones."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

from trainer.config.compose import CONFIG_DIR, check_overrides, config_keys, load_config
from trainer.config.schema import PPOConfig
from verl_like.errors import ConfigError

KEYS_FILE = Path(__file__).parent / "config_keys.txt"
NEEDED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]
PRESETS = sorted(path.stem for path in (CONFIG_DIR / "placement").glob("*.yaml"))


def leaves() -> list[str]:
    return [key for key, kind in config_keys() if not dataclasses.is_dataclass(kind)]


def load(*overrides: str) -> PPOConfig:
    return load_config([*NEEDED, *overrides])


def test_the_keys_are_the_frozen_ones() -> None:
    assert leaves() == KEYS_FILE.read_text(encoding="utf-8").splitlines()


def test_there_are_fewer_than_150_keys() -> None:
    assert len(leaves()) < 150


def test_every_field_has_a_docstring() -> None:
    for schema in {kind for _, kind in config_keys() if dataclasses.is_dataclass(kind)} | {
        PPOConfig
    }:
        source = inspect.getsource(schema)
        assert len(re.findall(r"^    \w+: .*\n    \"\"\"", source, re.M)) == len(
            re.findall(r"^    \w+: ", source, re.M)
        ), schema


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("estimator", ["gae", "grpo"])
def test_every_preset_composes(preset: str, estimator: str) -> None:
    config = load(
        f"placement={preset}", f"algorithm.adv_estimator={estimator}", "trainer.n_gpus_per_node=4"
    )
    assert set(config.role_mapping.values()) == set(config.resource_pool_spec)
    assert sum(map(sum, config.resource_pool_spec.values())) == 4
    assert ("critic" in config.role_mapping) == (estimator == "gae")


@pytest.mark.parametrize(
    ("num_nodes", "num_devices", "actor", "critic"),
    [
        (1, 2, [1], [1]),
        (1, 3, [2], [1]),
        (1, 8, [4], [4]),
        (2, 1, [1], [1]),
        (2, 8, [8], [8]),
        (3, 2, [2, 2], [2]),
    ],
)
def test_split_halves_devices_on_one_node_and_nodes_on_many(
    num_nodes: int, num_devices: int, actor: list[int], critic: list[int]
) -> None:
    config = load(
        "placement=split", f"trainer.nnodes={num_nodes}", f"trainer.n_gpus_per_node={num_devices}"
    )
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": actor, "critic_pool": critic}


def test_split_of_one_device_works_when_both_pools_are_given() -> None:
    pools = {"actor_rollout_ref_pool": [2], "critic_pool": [1]}
    config = load(
        "placement=split", *(f"resource_pool_spec.{pool}={sizes}" for pool, sizes in pools.items())
    )
    assert config.resource_pool_spec == pools


def test_a_pool_of_the_user_wins_over_the_preset() -> None:
    config = load(
        "placement=split", "trainer.n_gpus_per_node=4", "resource_pool_spec.critic_pool=[1]"
    )
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": [2], "critic_pool": [1]}


def test_the_reference_is_mapped_when_there_is_a_kl() -> None:
    assert "ref" not in load().role_mapping
    assert "ref" in load("algorithm.use_kl_in_reward=true").role_mapping
    assert "ref" in load("actor_rollout_ref.actor.use_kl_loss=true").role_mapping


def test_a_custom_role_composes() -> None:
    config = load("+role_mapping.judge=global_pool", "+role_workers.judge=my_package.Judge")
    assert config.role_mapping["judge"] == "global_pool"


def test_an_uneven_preset_says_so(caplog: pytest.LogCaptureFixture) -> None:
    load("placement=split", "trainer.n_gpus_per_node=3")
    assert "do not divide evenly" in caplog.text


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        ("+data.tran_batch_size=3", "Did you mean 'data.train_batch_size'"),
        ("++trainer.sed=3", "Did you mean 'trainer.seed'"),
        ("~trainer.sed", "Did you mean 'trainer.seed'"),
        ("lr=3", "Did you mean 'actor_rollout_ref.actor.optim.lr' or 'critic.optim.lr'"),
        ("placment=split", "Did you mean 'placement'"),
    ],
)
def test_an_unknown_key_gets_the_nearest_ones(override: str, answer: str) -> None:
    with pytest.raises(ConfigError, match="There is no key") as caught:
        check_overrides([override])
    assert answer in str(caught.value)
