"""`RayWorkerGroup`: starts one actor per place of a pool and constructs the roles in them."""

from __future__ import annotations

import uuid
from typing import Any

from ray import cloudpickle as ray_pickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_like.host import HostFacts
from verl_like.ray_backend.pools import RayResourcePool
from verl_like.ray_backend.transport import HostActor, RayTransport
from verl_like.watch import Deadlines
from verl_like.worker_group import ClassWithInitArgs, WorkerGroup


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its arguments, with options for the Ray actor that will hold it."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        """Nothing is constructed yet."""
        super().__init__(cls, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, options: dict[str, Any]) -> None:
        """More options for the actor, as `ray.remote` takes them."""
        self.options.update(options)

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Custom resources that the actor needs besides its device."""
        self.options.setdefault("resources", {}).update(additional_resource)


class RayWorkerGroup(WorkerGroup):
    """A worker group whose processes are Ray actors on a pool's placement groups."""

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name_prefix: str = "worker",
        worker_env: dict[str, str] | None = None,
        deadlines: Deadlines | None = None,
        seed: int = 0,
        log_dir: str | None = None,
        master_port: int = 0,
    ) -> None:
        """Starts one actor per process of the pool, under names that no other run has, and constructs the roles in "
        "them."""
        roles = ray_cls_with_init.roles(name_prefix)
        recipes = ray_pickle.dumps({role: (made.cls, made.args, made.kwargs) for role, made in roles.items()})
        limits = deadlines or resource_pool.deadlines
        bundles = resource_pool.bundles()
        kind = "cuda" if resource_pool.use_gpu else "cpu"
        name, run = "+".join(roles), uuid.uuid4().hex[:8]
        one_node = len(resource_pool.store) == 1
        facts = [
            HostFacts(name, rank, len(bundles), b.local_rank, kind, seed, log_dir, limits.rendezvous_s, one_node)
            for rank, b in enumerate(bundles)
        ]
        actors = []
        for fact, bundle in zip(facts, bundles, strict=True):
            options: dict[str, Any] = {
                "num_cpus": bundle.cpus,
                "num_gpus": bundle.gpus,
                "max_restarts": 0,
                "max_task_retries": 0,
            }
            options["name"] = f"{name}-{fact.rank}-{run}"
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(bundle.group, bundle.index)
            if worker_env:
                options["runtime_env"] = {"env_vars": dict(worker_env)}
            for made in roles.values():
                options.update(getattr(made, "options", {}))
            actors.append(HostActor.options(**options).remote(recipes, fact))
        where = [f"actor {name}-{fact.rank}-{run}" for fact in facts]
        transport = RayTransport(actors, facts, limits, master_port, where)
        transport.where = [f"pid {h.pid}" for h in transport.started]
        super().__init__(transport, {role: made.cls for role, made in roles.items()}, prefixed=ray_cls_with_init.fused)
