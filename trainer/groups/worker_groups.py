"""Start worker groups from a placement: roles, backends, and the lifetime of the processes.

    with WorkerGroups(config) as groups:
        print(groups.placement)
        groups["student"].init_model()

Roles are strings. A recipe's YAML has the classes of its roles, in the order in which they are
constructed. Your own role needs `role_workers.<role>=<dotted path>` and
`role_mapping.<role>=<pool>`, and no change here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import RunConfig
from trainer.groups.nodes import plan_on, require_shared_folder
from verl_like.calls.deadlines import Deadlines, in_daemon
from verl_like.calls.future import gather
from verl_like.calls.group import ClassWithInitArgs, WorkerGroup, create_colocated_worker_cls
from verl_like.calls.transport import Transport
from verl_like.errors import ConfigError, PlacementError, WorkerError, nearest
from verl_like.files import write_atomic
from verl_like.placement.plan import Placement, PoolPlan
from verl_like.placement.pools import ResourcePool, expand_roles
from verl_like.process.worker import Worker
from verl_like.registry import load_object

if TYPE_CHECKING:
    from verl_like.backends.ray import RayResourcePool

logger = logging.getLogger(__name__)


class PoolStarter:
    """Starts the pools of a plan; on Ray, it reserves their places until you release them."""

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        """Raise if this backend cannot run one of the pools."""
        self.config, self.placement = config, placement
        self.limits = Deadlines.from_settings(config.timeouts)
        self._neighbors: dict[str, Worker] = {}
        self._ray_pools: dict[str, RayResourcePool] = {}
        for plan in placement.pools.values():
            is_on_gpus = plan.device_kind == "cuda"
            if is_on_gpus and config.trainer.backend == "local" and self.has_own_processes(plan):
                raise PlacementError(
                    f"pool '{plan.name}' would be child processes of the driver, which "
                    "trainer.backend=local starts only on CPUs, but this machine has GPUs. Set "
                    "trainer.backend=ray, trainer.device=cpu, or "
                    f"pool_resources.{plan.name}.device=cpu only for this pool."
                )

    def has_own_processes(self, plan: PoolPlan) -> bool:
        """Return whether the pool has its own processes, separate from the driver's."""
        return not self.config.is_inline(plan.name, plan.world_size)

    def start(self, plan: PoolPlan, classes: Mapping[str, type[Worker]]) -> WorkerGroup:
        """Start a pool and return the group of its roles, in the order of `classes`."""
        trainer = self.config.trainer
        recipes = {r: ClassWithInitArgs(c, self.config.for_role(r)) for r, c in classes.items()}
        recipe = create_colocated_worker_cls(recipes)
        options: dict[str, Any] = {"seed": trainer.seed, "deadlines": self.limits}
        options["threads"] = trainer.threads_per_process or 1
        options["log_dir"] = str(Path(trainer.default_local_dir).resolve() / "logs")
        if trainer.backend == "ray":
            from verl_like.backends.ray import RayResourcePool, RayWorkerGroup

            if plan.name not in self._ray_pools:  # a restart reuses places that are not released
                self._ray_pools[plan.name] = RayResourcePool(
                    plan.process_on_nodes,
                    use_gpu=plan.device_kind == "cuda",
                    name_prefix=plan.name,
                    cpus_per_process=plan.cpus_per_process,
                    nodes=plan.nodes,
                    deadlines=self.limits,
                    gpus_per_process=plan.gpus_per_process,
                    resources=plan.resources,
                    labels=plan.labels,
                )
            return RayWorkerGroup(self._ray_pools[plan.name], recipe, **options)

        from verl_like.backends.local import LocalWorkerGroup

        options["device_name"] = plan.device_kind
        options["neighbors"] = self._neighbors
        options["own_processes"] = plan.name in self.config.child_pools
        return LocalWorkerGroup(ResourcePool(plan.process_on_nodes), recipe, **options)

    def leave(self, pool: str) -> None:
        """Release a pool's places on the cluster; its next start reserves places for its plan."""
        if pool in self._ray_pools:
            self._ray_pools.pop(pool).release()

    def release(self) -> None:
        """Release the places on the cluster, after the groups on them have ended."""
        for pool in self._ray_pools.values():
            pool.release()


def side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Run each of these calls in a thread, and wait for all.

    If some fail, the first error is raised with the others in its notes.
    """
    running = [in_daemon("start", call) for call in calls]
    outcomes = [future.exception() for future in running]
    errors = [error for error in outcomes if error is not None]
    if errors:
        first, *others = errors
        for other in others:
            first.add_note(f"another start failed, too: {type(other).__name__}: {other}")
        raise first


CALL_FIELDS = ("role", "method", "rank", "pid", "start", "end", "cpu_s")


def worker_class(config: RunConfig, role: str) -> type[Worker]:
    """Return the class of a role: the user's, or the one in the recipe's YAML."""
    path = config.role_workers.get(role)
    if not path:
        raise ConfigError(
            f"role {role!r} has no worker class. Set role_workers.{role}=<dotted path of its "
            "class>."
        )
    cls = load_object(path, f"role_workers.{role}")
    if not (isinstance(cls, type) and issubclass(cls, Worker)):
        raise ConfigError(f"role_workers.{role}={path} is not a subclass of verl_like.Worker.")
    return cls


def _records(pool: str, group: WorkerGroup) -> list[dict[str, Any]]:
    """Return the calls of a pool that have finished since the last time."""
    headers = group.transport.take_finished()
    return [{**{name: getattr(h, name) for name in CALL_FIELDS}, "pool": pool} for h in headers]


class WorkerGroups:
    """The worker group of every role. Leaving the `with` block ends all processes."""

    def __init__(self, config: RunConfig, worker_code: Sequence[str] | None = None) -> None:
        """Check the whole placement and import every class; only then start processes.

        `worker_code` has the names and paths of code that workers use, by default their classes.
        Pools with their own processes start concurrently. Pools in the driver's thread start before
        them one by one, because their roles may find siblings from other pools.
        """
        self.config = config
        self._life, self._is_over = threading.Lock(), False
        self.planning = threading.Lock()
        self._fused: dict[str, WorkerGroup] = {}
        self._groups: dict[str, WorkerGroup] = {}
        self._new_roles: set[str] = set()
        self._replaceable: frozenset[str] = frozenset()
        self._needed: list[Transport] = []
        self._calls_of_left: list[dict[str, Any]] = []
        """Calls of pools that have left since the last `take_calls`."""

        from trainer.groups.cluster import find_nodes

        code = list(config.role_workers.values() if worker_code is None else worker_code)
        self.placement = plan_on(config, find_nodes(config, code))
        self._classes = {
            role: worker_class(config, role) for role in expand_roles(config.role_mapping)
        }
        require_shared_folder(config, self.placement)
        self._starter = PoolStarter(config, self.placement)
        plans = list(self.placement.pools.values())
        inline = [plan for plan in plans if not self._starter.has_own_processes(plan)]
        try:
            for plan in inline:
                self._start(plan)
            side_by_side([partial(self._start, plan) for plan in plans if plan not in inline])
        except BaseException:
            self.shutdown()
            raise

        # pools may have come up in another order
        self._fused = {name: self._fused[name] for name in self.placement.pools}
        for name, group in self._fused.items():
            self._groups.update(group.spawn(self._roles(name)))
        # callers iterate over roles in the order of construction, not of pools, because a role may
        # compute with another role's module
        self._groups = {role: self._groups[role] for role in self._in_order(self._groups)}
        self._new_roles.update(self._groups)
        self._watch_each_other()

    def restart(self, pool: str) -> None:
        """Restart the processes of one pool on its places, while other pools continue.

        A lost node is replaced by another, or `InsufficientResourcesError` is raised. The pool's
        remaining processes are ended, so calls that wait for them fail. The roles are only
        constructed, and `groups[role]` is a new group from now on.
        """
        if pool not in self.placement.pools:
            hint = nearest(pool, self.placement.pools)
            raise PlacementError(
                f"there is no pool '{pool}' to restart.{hint} Pools: "
                f"{', '.join(self.placement.pools)}."
            )
        plan = self.placement.pools[pool]
        if not self._starter.has_own_processes(plan):
            raise PlacementError(
                f"pool '{plan.name}' cannot be restarted: it runs in the driver's own process. On "
                "trainer.backend=ray every pool has processes that can be restarted."
            )
        from trainer.groups.cluster import leave_lost_nodes

        has_moved, before = leave_lost_nodes(self, pool), self._fused[pool]
        before.shutdown()
        if has_moved:
            self._starter.leave(pool)
        self._start(self.placement.pools[pool])

        group = self._fused[pool]
        if group is not before:
            group.transport.finished.extend(before.transport.take_finished())
            with self.planning:
                self._groups = {**self._groups, **group.spawn(self._roles(pool))}
            self._new_roles.update(self._roles(pool))
            self._watch_each_other()
            self.may_be_replaced(self._replaceable)

    def join(self, pool: str) -> None:
        """Start a pool that the run has begun or gone on without; only construct its roles.

        Raise InsufficientResourcesError if no node has room.
        """
        from trainer.groups.cluster import with_pool

        with self.planning:
            self.placement = with_pool(self.config, self.placement, pool)
        self._starter.leave(pool)  # after a start that failed
        self._start(self.placement.pools[pool])
        with self.planning:
            self._groups = {**self._groups, **self._fused[pool].spawn(self._roles(pool))}

    def leave(self, pool: str) -> None:
        """End the processes of a pool and return its places; it may `join` again."""
        with self.planning:
            roles, group = self._roles(pool), self._fused.get(pool)
            self._fused = {name: g for name, g in self._fused.items() if name != pool}
            self._groups = {role: g for role, g in self._groups.items() if role not in roles}
            pools = self.placement.pools.items()
            self.placement = Placement({name: plan for name, plan in pools if name != pool})
        if group is not None:
            self._calls_of_left += _records(pool, group)
            group.shutdown()
        self._starter.leave(pool)

    def note_placement(self) -> None:
        """Write the placement to `placement.txt` of the run folder."""
        folder = Path(self.config.trainer.default_local_dir)
        write_atomic(folder / "placement.txt", f"{self.placement}\n")

    def construct_again(self, pool: str) -> None:
        """Construct the roles of a pool again in its processes, without their models."""
        self._fused[pool].transport.construct_again()
        self._new_roles.update(self._roles(pool))

    def take_new_roles(self) -> set[str]:
        """Return the roles constructed since the last call, which have no model yet."""
        new_roles, self._new_roles = self._new_roles, set()
        return new_roles

    def init_new_roles(self, arguments: Callable[[str], dict[str, Any]]) -> None:
        """Build the models of roles that have none, concurrently, with the role's `arguments`."""
        new_roles = self.take_new_roles()
        new = [role for role in self if role in new_roles]
        gather(*(self[role].init_model.remote(**arguments(role)) for role in new))

    def may_be_replaced(self, roles: frozenset[str]) -> None:
        """Let a pool with only these roles be replaced after a loss, when it is used next."""
        self._replaceable = roles
        for pools in self.pools_by_processes():
            can = all(roles.issuperset(self._roles(pool)) for pool in pools)
            self._fused[pools[0]].transport.is_replaceable = can

    def roles_of_pools(self) -> dict[str, list[str]]:
        """Return pool -> its roles, in the order in which they are constructed."""
        return {pool: self._roles(pool) for pool in self._fused}

    def pools_by_processes(self) -> list[list[str]]:
        """Return the pools, grouped by the processes that they share."""
        by_key: dict[int, list[str]] = {}
        for pool, group in self._fused.items():
            by_key.setdefault(group.transport.process_key, []).append(pool)
        return list(by_key.values())

    def lost_pools(self, seconds: float) -> dict[str, str]:
        """Return pool -> reason, for pools whose processes are gone, late or on drained nodes.

        Afterwards the other pools have no call in progress.
        """
        from trainer.groups.cluster import pools_to_move

        for group in self._fused.values():
            group.transport.companions = []  # every pool is checked by its own call
        until, answers = time.monotonic() + seconds, {}
        lost = dict.fromkeys(pools_to_move(self.config, self.placement), "Ray drains its node.")
        for pool in [pool for pool in self._fused if pool not in lost]:
            try:
                answers[pool] = self[self._roles(pool)[0]].answer_in_turn.remote()
            except WorkerError as error:
                lost[pool] = str(error)
        for pool, answer in answers.items():
            try:
                answer.get(max(until - time.monotonic(), 1.0))
            except WorkerError as error:
                lost[pool] = str(error)
        self._watch_each_other()
        return {pool: lost[pool] for pool in self._fused if pool in lost}

    def _watch_each_other(self) -> None:
        """Make a wait for one pool notice the loss of another pool that the run needs.

        Pools that work concurrently with the driver are excluded: the recipe watches them.
        """
        needed: dict[int, Transport] = {}
        for name, group in self._fused.items():
            if name not in self.config.child_pools:
                needed[group.transport.process_key] = group.transport
        for key, transport in needed.items():
            transport.companions = [
                other for other_key, other in needed.items() if other_key != key
            ]
        self._needed = list(needed.values())

    def check_idle(self, wait_name: str) -> None:
        """Raise if a pool that the run needs is lost while `wait_name` is waited for."""
        for transport in self._needed:
            transport.check_idle(wait_name)

    def _roles(self, pool: str) -> list[str]:
        """Return the roles of a pool in the order in which they are constructed."""
        return self._in_order(self.placement.pools[pool].roles)

    def _in_order(self, roles: Iterable[str]) -> list[str]:
        """Sort roles by the order of `role_workers`."""
        order = [*self.config.role_workers, *self._classes]
        return sorted(roles, key=order.index)

    def _start(self, plan: PoolPlan) -> None:
        classes = {role: self._classes[role] for role in self._roles(plan.name)}
        group = self._starter.start(plan, classes)
        with self._life:
            if not self._is_over:
                self._fused = {**self._fused, plan.name: group}  # other threads iterate over it
                return
        group.shutdown()  # the run ended while this pool started

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
        """Return the calls of every pool finished since the last call, for the timeline."""
        records, self._calls_of_left = self._calls_of_left, []
        for pool, group in list(self._fused.items()):
            records += _records(pool, group)
        return records

    def shutdown(self) -> None:
        """End all processes and release their places."""
        with self._life:
            self._is_over = True
        for group in self._fused.values():
            group.shutdown()
        self._starter.release()
