"""`RayWorkerGroup`: starts one actor per place of a pool and constructs the roles in them."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import cloudpickle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_like.backends.ray.cluster import has_one_node
from verl_like.backends.ray.host import HostActor, own_packages
from verl_like.backends.ray.pools import Bundle, RayResourcePool
from verl_like.backends.ray.transport import RayTransport
from verl_like.calls.group import ClassWithInitArgs, WorkerGroup, method_table
from verl_like.calls.waiting import Deadlines
from verl_like.errors import PlacementError
from verl_like.process.environment import checked_worker_env
from verl_like.process.facts import ProcessFacts
from verl_like.process.store import new_secret


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its arguments, with options for the Ray actor that will hold it."""

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        """Nothing is constructed yet."""
        # what `ray.remote(Worker)` made: take the worker out again
        metadata = getattr(cls, "__ray_metadata__", None)
        worker = metadata.modified_class.__ray_actor_class__ if metadata else cls
        super().__init__(worker, *args, **kwargs)
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
        worker_env: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
        seed: int = 0,
        log_dir: str | None = None,
        master_port: int = 0,
    ) -> None:
        """Starts one actor per process of the pool and constructs the roles.

        The actors have names that no other run has.
        """
        if not isinstance(resource_pool, RayResourcePool):
            raise PlacementError(
                f"RayWorkerGroup needs a RayResourcePool, got a {type(resource_pool).__name__}."
            )
        roles = ray_cls_with_init.roles(name_prefix)
        classes = {role: made.cls for role, made in roles.items()}
        method_table(classes, ray_cls_with_init.fused)
        env = checked_worker_env(worker_env)
        recipes = cloudpickle.dumps(
            {role: (made.cls, made.args, made.kwargs) for role, made in roles.items()}
        )
        limits = deadlines or resource_pool.deadlines
        bundles = resource_pool.bundles()
        name, size, kind = "+".join(roles), len(bundles), "cuda" if resource_pool.use_gpu else "cpu"
        times = limits.rendezvous_s, limits.call_s
        settings = kind, seed, log_dir, *times, has_one_node(), new_secret()
        facts = [
            ProcessFacts(name, rank, size, bundle.local_rank, *settings)
            for rank, bundle in enumerate(bundles)
        ]
        run = uuid.uuid4().hex[:8]
        names = [f"{name}-{rank}-{run}" for rank in range(size)]
        shared: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
        if env:
            shared["runtime_env"] = {"env_vars": env}
        for made in roles.values():
            shared.update(getattr(made, "options", {}))
        packages = own_packages()
        actors = []
        for actor_name, fact, bundle in zip(names, facts, bundles, strict=True):
            options = {"name": actor_name, **_place(bundle), **shared}
            actors.append(HostActor.options(**options).remote(recipes, fact, packages))
        transport = RayTransport(actors, facts, limits, master_port, names)
        super().__init__(transport, classes, prefixed=ray_cls_with_init.fused)


def _place(bundle: Bundle) -> dict[str, Any]:
    """The options that put an actor on its place of the pool."""
    return {
        "num_cpus": bundle.cpus,
        "num_gpus": bundle.gpus,
        "resources": bundle.resources,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
    }
