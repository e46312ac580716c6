"""From a placement to running worker groups: roles, backends, and the life of the processes.

    with WorkerGroups(config) as groups:
        print(groups.placement)
        groups["actor"].init_model(total_steps=100)

Roles are strings. One of your own needs `role_workers.<role>=<dotted path>` and
`role_mapping.<role>=<pool>`, nothing here.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import RunConfig
from trainer.groups.user_modules import modules_of_the_user
from verl_like.calls.group import ClassWithInitArgs, WorkerGroup, create_colocated_worker_cls
from verl_like.calls.waiting import Deadlines
from verl_like.errors import ConfigError, PlacementError, nearest
from verl_like.placement.plan import Placement, PoolPlan
from verl_like.placement.pools import Node, ResourcePool
from verl_like.process.worker import Worker
from verl_like.registry import load_object

if TYPE_CHECKING:
    from verl_like.backends.local.children import StartRank
    from verl_like.backends.ray import RayResourcePool

ROLE_WORKERS = {
    "actor": "workers.roles.actor.ActorWorker",
    "rollout": "workers.roles.rollout.RolloutWorker",
    "ref": "workers.roles.reference.ReferenceWorker",
    "teacher": "workers.roles.teacher.TeacherWorker",
    "critic": "workers.roles.critic.CriticWorker",
    "reward_model": "workers.roles.reward_model.RewardModelWorker",
}
"""The built-in roles, in the order in which they are constructed inside a process."""
NO_GPU = "trainer.device=cuda asks for GPUs, but"
WITHOUT_GPU = "Set trainer.device=auto or cpu to run on CPU slots."


def worker_class(config: RunConfig, role: str) -> type[Worker]:
    """The class that plays a role: the user's own, or the built-in one."""
    cls = load_object(config.role_workers.get(role) or ROLE_WORKERS[role], f"role_workers.{role}")
    if not (isinstance(cls, type) and issubclass(cls, Worker)):
        raise ConfigError(
            f"role_workers.{role}={config.role_workers[role]} is not a subclass of "
            "verl_like.Worker."
        )
    return cls


class WorkerGroups:
    """The worker group of every role. Leaving the `with` block ends all processes."""

    def __init__(self, config: RunConfig, worker_code: Sequence[str] | None = None) -> None:
        """Check the whole placement and import every class; only then start processes.

        `worker_code` are the dotted paths that workers import; by default their classes alone.
        Pools with processes of their own start at once. Before them, those of the driver's own
        thread start one by one: there a role may find neighbours from other pools.
        """
        self.config = config
        self._worker_code = list(
            config.role_workers.values() if worker_code is None else worker_code
        )
        self._life, self._is_over = threading.Lock(), False
        self._fused: dict[str, WorkerGroup] = {}
        self._groups: dict[str, WorkerGroup] = {}
        self._neighbours: dict[str, Worker] = {}
        self._ray_pools: list[RayResourcePool] = []

        nodes = self._connect()
        self.placement = Placement.plan(
            config.resource_pool_spec,
            config.role_mapping,
            nodes,
            cpus_per_process=config.cpus_per_process,
        )
        classes = {role: worker_class(config, role) for role in self.placement.role_mapping}
        self._require_shared_folder()
        self._start_all(classes)

    def _start_all(self, classes: dict[str, type[Worker]]) -> None:
        """Start every pool, or leave no process behind."""
        order = [*ROLE_WORKERS, *classes]
        pools = self.placement.pools
        roles = {name: sorted(plan.roles, key=order.index) for name, plan in pools.items()}
        one_by_one: list[Callable[[], None]] = []
        at_once: list[Callable[[], None]] = []
        for name, plan in pools.items():
            start = partial(self._start, plan, {role: classes[role] for role in roles[name]})
            (at_once if self._starts_beside_others(plan) else one_by_one).append(start)

        try:
            for start in one_by_one:
                start()
            side_by_side(at_once)
        except BaseException:
            self.shutdown()
            raise

        # pools may have come up in another order
        self._fused = {name: self._fused[name] for name in pools}
        for name, group in self._fused.items():
            self._groups.update(group.spawn(roles[name]))

    def __getitem__(self, role: str) -> Any:
        if role not in self._groups:
            hint = nearest(role, self._groups)
            raise ConfigError(
                f"this run has no role '{role}'.{hint} Roles: {', '.join(self._groups)}."
            )
        return self._groups[role]

    def __contains__(self, role: str) -> bool:
        return role in self._groups

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __enter__(self) -> WorkerGroups:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def take_calls(self) -> list[dict[str, Any]]:
        """The calls finished since the last time, of every pool, for the timeline."""
        records = []
        for pool, group in self._fused.items():
            for header in group.transport.take_finished():
                record = {
                    "role": header.role,
                    "method": header.method,
                    "rank": header.rank,
                    "pid": header.pid,
                    "start": header.start,
                    "end": header.end,
                    "cpu_s": header.cpu_s,
                    "pool": pool,
                }
                records.append(record)
        return records

    def shutdown(self) -> None:
        """End every process and give its place back."""
        with self._life:
            self._is_over = True
        for group in self._fused.values():
            group.shutdown()
        for pool in self._ray_pools:
            pool.release()

    def _connect(self) -> list[Node]:
        trainer, settings = self.config.trainer, self.config.ray
        if trainer.backend != "ray":
            self._device_kind = local_device(trainer.device)
            return [Node("this machine", trainer.n_gpus_per_node, float(os.cpu_count() or 1))]
        from verl_like.backends import ray as ray_backend

        joins = settings.address or os.environ.get("RAY_ADDRESS")
        runtime_env = dict(settings.runtime_env)
        if joins and (modules := modules_of_the_user(self._worker_code)):
            runtime_env["py_modules"] = [*runtime_env.get("py_modules", []), *modules]
        limits = Deadlines.of(self.config.watch)
        ray_backend.connect(settings.address, settings.namespace, runtime_env, limits)
        nodes = ray_backend.cluster_nodes(trainer.n_gpus_per_node, use_gpu=trainer.device != "cpu")
        if trainer.device == "cuda" and not any(node.kind == "GPU" for node in nodes):
            raise PlacementError(
                f"{NO_GPU} none of the {len(nodes)} node(s) of the cluster has one. {WITHOUT_GPU}"
            )
        return nodes

    def _require_shared_folder(self) -> None:
        """Where there is more than one node, all of them must see the run folder."""
        nodes = {node.key: node for plan in self.placement.pools.values() for node in plan.nodes}
        if len(nodes) > 1:
            from verl_like.backends.ray.shared_folder import require_shared_folder

            require_shared_folder(Path(self.config.trainer.default_local_dir), nodes.values())

    def _starts_beside_others(self, plan: PoolPlan) -> bool:
        """Whether the pool has processes of its own, which this one starts."""
        backend = self.config.trainer.backend
        is_inline = plan.world_size == 1 and plan.name not in self.config.child_pools
        return backend == "ray" or (backend == "local" and not is_inline)

    def _start(self, plan: PoolPlan, classes: dict[str, type[Worker]]) -> None:
        trainer = self.config.trainer
        recipe = create_colocated_worker_cls(
            {r: ClassWithInitArgs(c, self.config.of_role(r)) for r, c in classes.items()}
        )
        limits = Deadlines.of(self.config.watch)
        options: dict[str, Any] = {"seed": trainer.seed, "deadlines": limits}
        options["log_dir"] = str(Path(trainer.default_local_dir).resolve() / "logs")
        group: WorkerGroup
        if trainer.backend != "ray":
            from verl_like.backends.local.group import LocalWorkerGroup

            options.update(device_kind=self._device_kind, neighbours=self._neighbours)
            options["own_processes"] = plan.name in self.config.child_pools
            if trainer.backend == "torchrun":
                options["start_rank"] = start_by_torchrun(self.placement, limits)
            group = LocalWorkerGroup(ResourcePool(plan.process_on_nodes), recipe, **options)
        else:
            from verl_like.backends.ray import RayResourcePool, RayWorkerGroup

            pool = RayResourcePool(
                plan.process_on_nodes,
                use_gpu=plan.nodes[0].kind == "GPU",
                name_prefix=plan.name,
                cpus_per_process=plan.cpus_per_process,
                nodes=plan.nodes,
                deadlines=limits,
            )
            self._ray_pools.append(pool)
            group = RayWorkerGroup(pool, recipe, **options)
        with self._life:
            if not self._is_over:
                self._fused[plan.name] = group
                return
        group.shutdown()  # the start was interrupted while this pool was on its way


def start_by_torchrun(placement: Placement, limits: Deadlines) -> StartRank:
    """What finds torchrun's processes; they are the ranks of one pool."""
    from verl_like.backends.torchrun.ranks import ServingRanks, num_processes

    sizes = {name: plan.world_size for name, plan in placement.pools.items()}
    if list(sizes.values()) != [num_processes()]:
        pools = ", ".join(f"{name} of {size}" for name, size in sizes.items())
        raise PlacementError(
            f"torchrun started {num_processes()} processes, which are the ranks of one pool; this "
            f"run has {pools}. Leave trainer.n_gpus_per_node and resource_pool_spec out, take "
            "placement=colocate, or trainer.backend=ray."
        )
    return ServingRanks(limits.start_s).start


def side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Make these calls in a thread each, and wait for all.

    The first one's error is raised then, with the others in its notes.
    """
    errors: dict[int, BaseException] = {}

    def attempt(number: int) -> None:
        try:
            calls[number]()
        except BaseException as error:  # noqa: BLE001 - raised below, in the caller's thread
            errors[number] = error

    threads = [
        threading.Thread(target=attempt, args=(n,), name="start", daemon=True)
        for n in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first, *others = (errors[number] for number in sorted(errors))
        for other in others:
            first.add_note(f"another start failed, too: {type(other).__name__}: {other}")
        raise first


def local_device(device: str) -> str:
    """`trainer.device` for processes of this machine."""
    import torch

    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise PlacementError(
            f"{NO_GPU} torch {torch.__version__} sees none on this machine. {WITHOUT_GPU}"
        )
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device
