"""A driver written for verl's single controller, with only its imports changed.

These were:

    from verl import DataProto
    from verl.single_controller.base import Worker
    from verl.single_controller.base.decorator import (
        Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
    )
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
"""

from __future__ import annotations

import pytest

import verl_like
from tests.verl_like.verl_workers import CriticWorker, PolicyWorker
from verl_like import (
    DataProto,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)


def drive(resource_pool, ray_worker_group_cls, wrap) -> None:
    class_dict = {
        "actor": RayClassWithInitArgs(cls=wrap(PolicyWorker), config={"scale": 3}, role="actor"),
        "critic": RayClassWithInitArgs(cls=wrap(CriticWorker), config={"scale": 2}),
    }
    worker_dict_cls = create_colocated_worker_cls(class_dict=class_dict)
    wg_dict = ray_worker_group_cls(resource_pool=resource_pool, ray_cls_with_init=worker_dict_cls)
    spawn_wg = wg_dict.spawn(prefix_set=class_dict.keys())
    actor, critic = spawn_wg["actor"], spawn_wg["critic"]
    actor.init_model()
    critic.init_model()

    batch = DataProto.from_single_dict(CriticWorker.rows(5))
    values = critic.compute_values(batch)
    batch = batch.union(values)
    assert batch.batch["values"].tolist() == [0, 2, 4, 6, 8]
    log_probs = actor.compute_log_prob(batch)
    assert log_probs.batch["old_log_probs"].tolist() == [0, 3, 6, 9, 12]

    critic_output = critic.update_critic(batch)
    actor_output = actor.update_actor(batch)
    critic_output = critic_output.get()
    actor_output = actor_output.get()
    assert actor_output.meta_info["metrics"]["loss"] == [2.0] * actor_output.meta_info["world_size"]
    assert critic_output.non_tensor_batch["uid"].tolist() == [f"u{i}" for i in range(5)]
    assert actor.get_rank_info() == [
        f"{rank}/{actor.world_size}" for rank in range(actor.world_size)
    ]
    assert actor.only_zero(5) == 5
    wg_dict.shutdown()


@pytest.mark.parametrize("size", [1, 2])
def test_a_verl_driver_runs_locally(size: int) -> None:
    drive(verl_like.ResourcePool([size]), LocalWorkerGroup, lambda cls: cls)


@pytest.mark.ray
def test_a_verl_driver_runs_on_ray(ray_session) -> None:
    import ray

    pool = RayResourcePool(
        process_on_nodes=[2], use_gpu=False, max_colocate_count=3, name_prefix="global_pool"
    )
    drive(pool, RayWorkerGroup, ray.remote)
    pool.release()
