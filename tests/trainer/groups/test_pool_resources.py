"""The resources of a pool's processes: impossible ones are rejected, and Ray reserves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.runs import overrides
from tests.trainer.groups.reporting_role import reporting
from trainer import load_config
from trainer.config.schema import PoolResources
from trainer.groups.cluster import find_nodes
from trainer.groups.nodes import needs_of_pools
from trainer.groups.worker_groups import WorkerGroups
from verl_like.config_key import replace_keys
from verl_like.errors import ConfigError, PlacementError

ROLES = {"rollout": "generator_0_pool", "actor": "trainer_pool"}
SPLIT = ("placement=split", "trainer.n_gpus_per_node=2")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("critic_pol.cpus=1", "pool_resources.critic_pol: .* Did you mean 'critic_pool'"),
        ("critic_pool.cpu=1", "'pool_resources.critic_pool.cpu'. Did you mean 'cpus'.* has dev"),
        ("critic_pool={cpu: 1}", "'pool_resources.critic_pool.cpu'. Did you mean 'cpus'"),
        ("critic_pool.cpus=0", r"pool_resources.critic_pool.cpus=0.*above 0"),
        ("critic_pool.device=tpu", "pool_resources.critic_pool.device=tpu: choose one of auto"),
        ("critic_pool.gpus=2", "critic_pool.gpus=2.0: .* a process computes on one GPU"),
        ("critic_pool={device: cpu, gpus: 0.5}", "device=cpu and gpus=0.5. Leave out gpus"),
        ("critic_pool.resources.GPU=1", "resources.GPU: `resources` takes only custom"),
        ("critic_pool.resources.accel=0", "resources.accel=0"),
    ],
)
def test_impossible_resources_are_rejected_with_their_key(
    tiny_dir: Path, tmp_path: Path, setting: str, message: str
) -> None:
    key = f"pool_resources.{setting}"
    with pytest.raises(ConfigError, match=message):
        load_config(overrides(tiny_dir, tmp_path, "trainer.backend=ray", *SPLIT, key))


@pytest.mark.parametrize("key", ["cpus=0.5", "gpus=0.5", "resources.accel=1"])
def test_resources_have_no_effect_without_ray(
    tiny_dir: Path, tmp_path: Path, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"pool_resources.critic_pool.{key}"
    load_config(overrides(tiny_dir, tmp_path, "trainer.backend=local", *SPLIT, key))
    name = key.partition("=")[0].partition(".accel")[0]
    assert f"{name} has no effect: trainer.backend is not ray" in caplog.text


def test_keys_of_a_pool_are_set_one_by_one_or_together(tiny_dir: Path, tmp_path: Path) -> None:
    keys = ["critic_pool.cpus=0.5", "critic_pool.resources.accel=1", "critic_pool={gpus: 0.5}"]
    on_ray = ["trainer.backend=ray", *(f"pool_resources.{key}" for key in keys)]
    config = load_config(overrides(tiny_dir, tmp_path, *SPLIT, *on_ray))
    whole = PoolResources(cpus=0.5, gpus=0.5, resources={"accel": 1.0})
    assert config.pool_resources == {"critic_pool": whole}


def test_the_device_of_a_single_pool_has_no_effect(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = "pool_resources.global_pool.device=cpu"
    config = load_config(overrides(tiny_dir, tmp_path, "placement=colocate", key))
    assert config.pool_resources == {}
    assert "has no effect: this run has one pool, which trainer.device" in caplog.text


def test_a_pool_has_its_own_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = reporting(tmp_path, ROLES, generator_0_pool=1, trainer_pool=1)
    config = replace_keys(
        config, {"pool_resources": {"generator_0_pool": PoolResources(device="cpu")}}
    )
    needs = needs_of_pools(config)
    assert [need.device for need in needs.values()] == ["cpu", "auto"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_nodes(config, [])[0].kind == "GPU"

    config = replace_keys(config, {"trainer.device": "cpu"})
    assert find_nodes(config, [])[0].kind == "CPU slot"
    pools = config.pool_resources | {"trainer_pool": PoolResources(device="cuda")}
    config = replace_keys(config, {"pool_resources": pools})
    assert find_nodes(config, [])[0].kind == "GPU"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlacementError, match="pool_resources.trainer_pool.device=cuda asks for"):
        find_nodes(config, [])


def test_children_on_gpus_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = reporting(tmp_path, ROLES, generator_0_pool=1, trainer_pool=1)
    with pytest.raises(
        PlacementError, match="'generator_0_pool' would be child .*generator_0_pool.device=cpu"
    ):
        WorkerGroups(config)
    config = replace_keys(
        config, {"pool_resources": {"generator_0_pool": PoolResources(device="cpu")}}
    )
    with WorkerGroups(config) as groups:
        assert groups["rollout"].device_kind() == ["cpu"]
        assert groups["actor"].device_kind() == ["cuda"]


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_ray_reserves_the_resources_of_a_pool(tmp_path: Path) -> None:
    from ray.util import placement_group_table

    config = reporting(tmp_path, ROLES, "ray", generator_0_pool=1, trainer_pool=2)
    config = replace_keys(
        config, {"pool_resources": {"generator_0_pool": PoolResources(cpus=0.75)}}
    )
    with WorkerGroups(config) as groups:
        places = [row for row in placement_group_table().values() if row["state"] == "CREATED"]
        bundles = {row["name"].partition("-")[0]: list(row["bundles"].values()) for row in places}
        assert bundles["generator_0_pool"] == [{"CPU": 0.75}]
        assert bundles["trainer_pool"] == [{"CPU": 0.1}] * 2
        groups.restart("generator_0_pool")
        assert groups["rollout"].who()[0][0] == "rollout"

    accelerated = {"generator_0_pool": PoolResources(resources={"accel": 1.0})}
    config = replace_keys(config, {"pool_resources": accelerated})
    with pytest.raises(PlacementError, match="pool 'generator_0_pool' needs .* 1 accel each"):
        WorkerGroups(config)
