"""Options of a group that only Ray has: devices, variables of a class, detached workers."""

from __future__ import annotations

import pytest

from tests.verl_like.hybrid_workers import Hybrid
from verl_like import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl_like.errors import ConfigError, PlacementError

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def test_detached_workers_are_found_again_by_their_names() -> None:
    role_class = RayClassWithInitArgs(Hybrid)
    role_class.update_options({"runtime_env": {"env_vars": {"ITS": "own"}}})
    with RayResourcePool([2], use_gpu=False, cpus_per_process=0.5, detached=True) as pool:
        group = RayWorkerGroup(
            pool, role_class, detached=True, device_name="cpu", worker_env={"MINE": "7"}
        )
        group.init_model()
        assert group.execute_all_sync("getenv", "ITS") == ["own"] * 2
        assert group.execute_all_sync("getenv", "MINE") == ["7"] * 2

        again = RayWorkerGroup.from_detached(group.worker_names, RayClassWithInitArgs(Hybrid))
        assert again.world_size == 2
        assert again.both(1) == [10, 20]
        assert [dp for dp, _ in again.mesh_layout("all")] == [0, 1]
        with pytest.raises(PlacementError, match="has the roles adder, scaler, worker, but"):
            RayWorkerGroup.from_detached(group.worker_names, RayClassWithInitArgs(object))
        with pytest.raises(PlacementError, match="but ray_cls_with_init has adder, scaler, other"):
            RayWorkerGroup.from_detached(group.worker_names, role_class, name_prefix="other")
        again.shutdown()


def test_invalid_detached_groups_are_rejected() -> None:
    with pytest.raises(PlacementError, match="detached workers need a pool that outlives"):
        RayWorkerGroup(RayResourcePool([1]), RayClassWithInitArgs(Hybrid), detached=True)
    with pytest.raises(PlacementError, match="worker_names does not run in Ray's namespace"):
        RayWorkerGroup.from_detached(["nobody"], RayClassWithInitArgs(Hybrid))


def test_a_device_that_the_pool_lacks_is_rejected() -> None:
    with (
        RayResourcePool([1], use_gpu=False, cpus_per_process=0.5) as pool,
        pytest.raises(PlacementError, match=r"device_name='cuda': pool .* has the device cpu"),
    ):
        RayWorkerGroup(pool, RayClassWithInitArgs(Hybrid), device_name="cuda")


def test_roles_of_one_process_must_agree_on_its_environment() -> None:
    role_class = RayClassWithInitArgs(Hybrid)
    role_class.update_options({"runtime_env": {"env_vars": {"MINE": "8"}}})
    with pytest.raises(
        ConfigError, match="worker sets MINE=8 .*worker_env or another role sets 7;"
    ):
        RayWorkerGroup(RayResourcePool([1]), role_class, worker_env={"MINE": "7"})
    role_class.update_options({"runtime_env": {"env_vars": {"RANK": "1"}}})
    with pytest.raises(ConfigError, match="the launcher sets RANK for every rank"):
        RayWorkerGroup(RayResourcePool([1]), role_class)
