"""Presets together with a user's settings, and settings that errors recommend."""

from __future__ import annotations

import re

import pytest

from trainer import PPOConfig, load_config
from trainer.launch import nominal_placement
from verl_like.errors import ConfigError, PlacementError

NEEDED = [
    "data.train_files=train.parquet",
    "actor_rollout_ref.model.path=model",
    "algorithm.use_kl_in_reward=true",
]
OWN_POOL = ["resource_pool_spec.own=[1]", "trainer.n_gpus_per_node=8"]


def load(*overrides: str) -> PPOConfig:
    """Load the configuration, on the machines that it names."""
    config = load_config([*NEEDED, *overrides])
    nominal_placement(config)
    return config


@pytest.mark.parametrize(
    ("placement", "names", "mapping"),
    [
        ("colocate", ["rollout"], {"actor": "global_pool", "rollout": "own"}),
        ("split", ["actor"], {"actor": "own", "rollout": "actor_rollout_ref_pool"}),
        ("split", ["actor_rollout_ref"], {"actor_rollout_ref": "own", "critic": "critic_pool"}),
        ("colocate", ["actor_rollout", "ref", "critic"], {"actor_rollout": "own", "ref": "own"}),
    ],
)
def test_user_mappings_come_first(
    placement: str, names: list[str], mapping: dict[str, str]
) -> None:
    mapped = [f"role_mapping.{name}=own" for name in names]
    config = load(f"placement={placement}", *mapped, *OWN_POOL)
    assert mapping.items() <= config.role_mapping.items()
    assert set(config.role_mapping.values()) == set(config.resource_pool_spec)


@pytest.mark.parametrize(
    ("placement", "num_nodes", "own", "shared"),
    [
        ("colocate", 1, "[2]", {"global_pool": [6]}),
        ("split", 1, "[1]", {"actor_rollout_ref_pool": [4], "critic_pool": [3]}),
        ("split", 2, "[3]", {"actor_rollout_ref_pool": [5], "critic_pool": [8]}),
        ("split", 2, "[8]", {"actor_rollout_ref_pool": [4], "critic_pool": [4]}),
        ("split", 1, "[2] role_mapping.critic=own", {"actor_rollout_ref_pool": [6]}),
    ],
)
def test_a_preset_divides_the_devices_that_other_pools_leave(
    placement: str, num_nodes: int, own: str, shared: dict[str, list[int]]
) -> None:
    machines = (f"trainer.nnodes={num_nodes}", "trainer.n_gpus_per_node=8")
    judge = ("role_mapping.judge=own", "role_workers.judge=my_package.Judge")
    pool = f"resource_pool_spec.own={own}".split()
    pools = load(f"placement={placement}", *machines, *judge, *pool).resource_pool_spec
    assert {name: sizes for name, sizes in pools.items() if name != "own"} == shared


@pytest.mark.parametrize(
    ("num_nodes", "num_devices", "sizes"),
    [(2, 8, [[3, 3], [2, 2], [1, 1], [2, 2]]), (8, 4, [[4] * 3, [4] * 2, [4], [4] * 2])],
)
def test_a_pool_of_frozen_models_has_fewer_devices(
    num_nodes: int, num_devices: int, sizes: list[list[int]]
) -> None:
    nodes = f"trainer.nnodes={num_nodes}", f"trainer.n_gpus_per_node={num_devices}"
    config = load("placement=standalone", *nodes)
    assert list(config.resource_pool_spec.values()) == sizes


@pytest.mark.parametrize(
    ("resources", "left"), [({"device": "cpu"}, [4]), ({"gpus": 0.5}, [3]), ({"cpus": 0.25}, [2])]
)
def test_shared_pools_leave_more_to_others(resources: dict[str, object], left: list[int]) -> None:
    taken = (f"pool_resources.own.{name}={value}" for name, value in resources.items())
    pool = ["resource_pool_spec.own=[2]", "role_mapping.critic=own", "trainer.simulate=4xH100"]
    config = load(*pool, *taken)
    assert config.resource_pool_spec["global_pool"] == left


@pytest.mark.parametrize(
    ("overrides", "slots"),
    [
        ([], 1),
        (["placement=split"], 2),
        (["placement=split", "role_mapping.ref=own", "resource_pool_spec.own=[2]"], 4),
        (["placement=split", "trainer.n_gpus_per_node=4"], 4),
    ],
)
def test_cpu_slots_match_the_pools(overrides: list[str], slots: int) -> None:
    config = load(*overrides)
    assert config.trainer.n_gpus_per_node == slots
    assert sum(sum(sizes) for sizes in config.resource_pool_spec.values()) == slots


ONE_DEVICE = "trainer.n_gpus_per_node=1"


@pytest.mark.parametrize(
    ("overrides", "too_few"),
    [
        (
            ["placement=split", ONE_DEVICE],
            "leaves no device for 'critic_pool'. Each of these pools needs",
        ),
        (
            ["placement=split", "role_mapping.ref=own", "resource_pool_spec.own=[1]", ONE_DEVICE],
            "comes first",
        ),
        (
            ["placement=standalone", "trainer.nnodes=2", "trainer.n_gpus_per_node=3"],
            "trainer.nnodes=2 x trainer.n_gpus_per_node=3 leaves no device for 'critic_pool'",
        ),
        (["resource_pool_spec.global_pool=[9]", ONE_DEVICE], "set trainer.n_gpus_per_node=9"),
        (
            [
                ONE_DEVICE,
                "placement=split",
                "resource_pool_spec.actor_rollout_ref_pool=[5]",
                "resource_pool_spec.critic_pool=[3]",
            ],
            "set trainer.n_gpus_per_node=8, the devices of a node for all pools",
        ),
    ],
)
def test_recommendations_for_too_few_devices_work(overrides: list[str], too_few: str) -> None:
    with pytest.raises((ConfigError, PlacementError)) as caught:
        load(*overrides)
    assert too_few in str(caught.value)
    settings = re.findall(r"(trainer\.n_gpus_per_node=\d+)(?= or more|,)", str(caught.value))
    if "placement=colocate, where" in str(caught.value):
        settings.append("placement=colocate")
    assert settings
    for setting in settings:
        replaced = setting.partition("=")[0]
        load(*(override for override in overrides if not override.startswith(replaced)), setting)


def test_a_pool_with_more_entries_than_nodes_is_rejected() -> None:
    pool = "resource_pool_spec.global_pool=[1,1]"
    with pytest.raises(
        PlacementError, match=r"one number in .* for each of the 1 node\(s\), .*nnodes"
    ):
        load(pool)
    load(pool, "trainer.nnodes=2")

    with_a_preset = ["placement=split", "resource_pool_spec.critic_pool=[2,2]"]
    devices = "trainer.n_gpus_per_node=3"
    with pytest.raises(ConfigError, match=r"a number for each of 2 nodes, but trainer.nnodes=1\."):
        load(*with_a_preset, devices)
    load(*with_a_preset, devices, "trainer.nnodes=2")
    load("placement=split", "resource_pool_spec.critic_pool=[2]", devices)


def test_a_pool_without_a_size_is_rejected_with_its_setting() -> None:
    with pytest.raises(PlacementError, match=r"Add this pool with resource_pool_spec.own=\[1\]"):
        load("role_mapping.critic=own", "trainer.n_gpus_per_node=2")
    load("role_mapping.critic=own", "trainer.n_gpus_per_node=2", "resource_pool_spec.own=[1]")
