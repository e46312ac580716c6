"""Every YAML composes, the list of keys is frozen, and an unknown key gets the nearest ones."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from trainer import load_config
from trainer.config.compose import check_overrides
from trainer.config.keys import config_keys, leaf_keys
from trainer.config.schema import RunConfig
from trainer.config.unused_keys import why_unused
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from verl_like.errors import ConfigError

KEYS_FILE = Path(__file__).parent / "ppo_keys.txt"
NEEDED = ["data.train_files=train.parquet", "actor_rollout_ref.model.path=model"]


def leaves() -> list[str]:
    return [key.name for key in leaf_keys(PPOConfig)]


def load(*overrides: str) -> PPOConfig:
    return load_config([*NEEDED, *overrides])


def test_the_keys_are_the_frozen_ones() -> None:
    assert leaves() == KEYS_FILE.read_text(encoding="utf-8").splitlines()


def test_a_default_run_reads_fewer_than_125_keys() -> None:
    """What a user has to know; the keys of an optional part are read once it is asked for."""
    config = load()
    assert len([name for name in leaves() if why_unused(config, name) is None]) < 125


def test_there_are_fewer_than_250_keys() -> None:
    assert len(leaves()) < 250


def test_every_field_has_a_docstring() -> None:
    sections = [key.kind for key in config_keys(PPOConfig) if key.is_section]
    for schema in {PPOConfig, RunConfig, *sections}:
        assert undocumented(schema) == [], schema


def undocumented(schema: type) -> list[str]:
    """Fields that a class declares without a string under them."""
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


@pytest.mark.parametrize("preset", PPO.placements)
@pytest.mark.parametrize("estimator", ["gae", "reinforce_plus_plus"])
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


def test_a_pool_of_the_user_wins_over_the_preset_which_has_the_rest() -> None:
    config = load(
        "placement=split", "trainer.n_gpus_per_node=4", "resource_pool_spec.critic_pool=[1]"
    )
    assert config.resource_pool_spec == {"actor_rollout_ref_pool": [3], "critic_pool": [1]}


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
        check_overrides([override], PPO)
    assert answer in str(caught.value)
