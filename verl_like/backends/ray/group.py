"""`RayWorkerGroup`: starts one actor per place of a pool and constructs the roles in them.

With `detached=True` the actors outlive the driver; another driver finds them by their names:

    names = RayWorkerGroup(pool, role_class, detached=True).worker_names
    group = RayWorkerGroup.from_detached(worker_names=names, ray_cls_with_init=role_class)
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl_like.backends.ray.pools import RayResourcePool
from verl_like.backends.ray.transport import HostActor, RayTransport, local_packages
from verl_like.calls.deadlines import Deadlines
from verl_like.calls.group import ClassWithInitArgs, WorkerGroup, check_group_arguments
from verl_like.errors import ConfigError, PlacementError
from verl_like.process.host import pack_constructors
from verl_like.process.info import ProcessInfo, checked_worker_env


class RayClassWithInitArgs(ClassWithInitArgs):
    """A worker class and its arguments, with options for its Ray actor.

    Example:

        critic = RayClassWithInitArgs(Critic, config)
        critic.update_options({"runtime_env": {"env_vars": {"NCCL_DEBUG": "INFO"}}})

    Args:
        cls: a subclass of `Worker`, or `ray.remote` of one.
        args: the constructor's positional arguments.
        kwargs: its keyword arguments.
    """

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        """Store the class and the arguments, which are pickled for the process."""
        # a class from `ray.remote(Worker)` contains the worker class
        metadata = getattr(cls, "__ray_metadata__", None)
        worker = metadata.modified_class.__ray_actor_class__ if metadata else cls
        super().__init__(worker, *args, **kwargs)
        self.options: dict[str, Any] = {}

    def update_options(self, options: dict[str, Any]) -> None:
        """Add options of `ray.remote` for the actor.

        Variables of its `runtime_env` are added to the group's `worker_env`.
        """
        self.options.update(options)


class _RunningWorkers(WorkerGroup):
    """A worker group whose processes are Ray actors."""

    transport: RayTransport

    @property
    def worker_names(self) -> list[str]:
        """The names of the actors, in rank order."""
        return self.transport.names


class RayWorkerGroup(_RunningWorkers):
    """Starts a Ray actor on every place of a pool, and constructs the roles in them.

    Example:

        pool = RayResourcePool([2])
        group = RayWorkerGroup(pool, RayClassWithInitArgs(Adder, 1))
        group.add(data)                 # a method of `Adder` with `@register`

    Args:
        resource_pool: the pool, which is reserved now if it is not yet.
        ray_cls_with_init: the worker's class, or the result of `create_colocated_worker_cls`.
        name_prefix: the role's name, in messages, logs and the names of actors.
        worker_env: environment variables of the processes.
        deadlines: limits of the waits, in seconds; by default those of the pool.
        seed: seed of the workers' random numbers.
        threads: number of threads with which torch computes in each process on a CPU.
        log_dir: folder for a log per role and rank; None writes none.
        master_port: port of the first rank's store; 0 chooses a free one.
        device_name: "cpu" or "cuda"; by default the pool's devices.
        detached: the actors outlive this driver, on a pool that is detached as well.

    Raises:
        PlacementError: the pool does not fit, or the cluster lacks resources for it.
        WorkerError: places are not free in time, or a process dies or does not start in time.
        Exception: whatever a constructor raises.
    """

    def __init__(
        self,
        resource_pool: RayResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name_prefix: str = "worker",
        worker_env: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
        seed: int = 0,
        threads: int = 1,
        log_dir: str | None = None,
        master_port: int = 0,
        device_name: str | None = None,
        detached: bool = False,
    ) -> None:
        """Start one actor per process of the pool, and construct the roles."""
        check_group_arguments(self, RayResourcePool, resource_pool, ray_cls_with_init)
        if detached and not resource_pool.detached:
            raise PlacementError(
                "detached workers need a pool that outlives this driver: RayResourcePool(..., "
                "detached=True)."
            )

        roles = ray_cls_with_init.roles(name_prefix)
        constructors = ray_cls_with_init.constructors(name_prefix)
        options = _actor_options(roles, checked_worker_env(worker_env))
        if detached:
            options["lifetime"] = "detached"
        packed = pack_constructors(constructors)

        limits = deadlines or resource_pool.deadlines
        bundles = resource_pool.bundles()
        pool_device = "cuda" if resource_pool.use_gpu else "cpu"
        if device_name not in (None, "cpu", pool_device):
            raise PlacementError(
                f"device_name={device_name!r}: pool {resource_pool.name} has the device "
                f"{pool_device}. Leave out device_name, or use a pool with use_gpu=True on nodes "
                "with GPUs."
            )
        name = "+".join(roles)
        processes = resource_pool.process_infos(
            name,
            limits,
            device_kind=device_name or pool_device,
            seed=seed,
            threads=threads,
            log_dir=log_dir,
            # dead nodes count, too: they may come back, and their processes must reach these
            one_node=len(ray.nodes()) == 1,
        )
        run = uuid.uuid4().hex[:8]
        names = [f"{name}-{rank}-{run}" for rank in range(len(processes))]
        packages, actors = local_packages(), []
        for actor_name, fact, bundle in zip(names, processes, bundles, strict=True):
            place = {
                "name": actor_name,
                "num_cpus": bundle.cpus,
                "num_gpus": bundle.gpus if fact.device_kind == "cuda" else 0.0,
                "resources": bundle.resources,
                "scheduling_strategy": PlacementGroupSchedulingStrategy(bundle.group, bundle.index),
            }
            actors.append(HostActor.options(**{**place, **options}).remote(packed, fact, packages))
        transport = RayTransport(actors, processes, limits, names, master_port)
        classes = {role: role_class.cls for role, role_class in roles.items()}
        super().__init__(transport, classes, prefixed=ray_cls_with_init.prefixed)

    @staticmethod
    def from_detached(
        worker_names: Sequence[str],
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name_prefix: str | None = None,
        deadlines: Deadlines | None = None,
    ) -> _RunningWorkers:
        """Connect to running workers by their names, and return their group.

        Args:
            worker_names: `worker_names` of the group that started them, in rank order.
            ray_cls_with_init: the classes of their roles; nothing is constructed.
            name_prefix: the prefix of that group; it may be omitted.
            deadlines: limits of the waits, in seconds; None takes the defaults.

        Raises:
            PlacementError: no such worker runs in Ray's namespace, or it has other roles.
        """
        try:
            actors = [ray.get_actor(name) for name in worker_names]
        except ValueError as error:
            raise PlacementError(
                "a worker in worker_names does not run in Ray's namespace "
                f"'{ray.get_runtime_context().namespace}'. This driver and the driver that started "
                f"the workers need the same namespace: ray.init(namespace=...). Ray says: {error}"
            ) from None
        processes: list[ProcessInfo] = ray.get([actor.process_info.remote() for actor in actors])
        started_roles = processes[0].name.split("+")
        roles = ray_cls_with_init.roles(name_prefix or started_roles[-1])
        if list(roles) != started_roles:
            raise PlacementError(
                f"{worker_names[0]} has the roles {', '.join(started_roles)}, but "
                f"ray_cls_with_init has {', '.join(roles)}: pass the classes (and the "
                "name_prefix, if any) that the workers were started with."
            )
        transport = RayTransport(actors, processes, deadlines or Deadlines(), worker_names)
        classes = {role: role_class.cls for role, role_class in roles.items()}
        return _RunningWorkers(transport, classes, prefixed=ray_cls_with_init.prefixed)


def _actor_options(
    roles: Mapping[str, ClassWithInitArgs], worker_env: dict[str, str]
) -> dict[str, Any]:
    """Return the options of an actor for all roles, with their environment variables."""
    options: dict[str, Any] = {"max_restarts": 0, "max_task_retries": 0}
    variables, runtime_env = dict(worker_env), {}
    for role, role_class in roles.items():
        role_options = dict(getattr(role_class, "options", {}))
        role_env = dict(role_options.pop("runtime_env", None) or {})
        for name, value in checked_worker_env(role_env.pop("env_vars", None)).items():
            if variables.setdefault(name, value) != value:
                raise ConfigError(
                    f"{role} sets {name}={value} in its environment, but worker_env or another "
                    f"role sets {variables[name]}; roles that share a process share its "
                    "environment. Set the same value for both."
                )
        runtime_env.update(role_env)
        options.update(role_options)
    if variables:
        runtime_env["env_vars"] = variables
    return {**options, "runtime_env": runtime_env} if runtime_env else options
