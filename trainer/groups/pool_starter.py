"""Start the processes of one pool on the configured backend.

The run starts every pool this way, and restarts one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.schema import RunConfig
from verl_like.calls.diagnose import Deadlines
from verl_like.calls.group import ClassWithInitArgs, WorkerGroup, create_colocated_worker_cls
from verl_like.errors import PlacementError
from verl_like.placement.plan import Placement, PoolPlan
from verl_like.placement.pools import ResourcePool
from verl_like.process.worker import Worker

if TYPE_CHECKING:
    from verl_like.backends.ray import RayResourcePool


class PoolStarter:
    """Starts pools of a plan; on Ray it reserves their places until they are released."""

    def __init__(self, config: RunConfig, placement: Placement) -> None:
        """Raise if this backend cannot run one of the pools."""
        self.config, self.placement = config, placement
        self.limits = Deadlines.of(config.timeouts)
        self._neighbours: dict[str, Worker] = {}
        self._ray_pools: dict[str, RayResourcePool] = {}
        for plan in placement.pools.values():
            is_on_gpus = plan.device_kind == "cuda"
            if is_on_gpus and config.trainer.backend == "local" and self.has_own_processes(plan):
                raise PlacementError(
                    f"pool '{plan.name}' is child processes of the driver, which "
                    "trainer.backend=local has on CPUs only, and this machine has GPUs. Set "
                    f"trainer.backend=ray, trainer.device=cpu, or pool_resources.{plan.name}."
                    "device=cpu only for this pool."
                )

    def has_own_processes(self, plan: PoolPlan) -> bool:
        """Return whether the pool has processes apart from the driver's."""
        return self.config.has_own_processes(plan.name, plan.world_size)

    def start(self, plan: PoolPlan, classes: Mapping[str, type[Worker]]) -> WorkerGroup:
        """Start a pool and return the group of its roles, in the order of `classes`."""
        trainer = self.config.trainer
        recipes = {r: ClassWithInitArgs(c, self.config.of_role(r)) for r, c in classes.items()}
        recipe = create_colocated_worker_cls(recipes)
        options: dict[str, Any] = {"seed": trainer.seed, "deadlines": self.limits}
        options["log_dir"] = str(Path(trainer.default_local_dir).resolve() / "logs")
        if trainer.backend == "ray":
            from verl_like.backends.ray import RayWorkerGroup

            return RayWorkerGroup(self._ray_pool(plan), recipe, **options)

        from verl_like.backends.local import LocalWorkerGroup

        options["device_name"] = plan.device_kind
        options["neighbours"] = self._neighbours
        options["own_processes"] = plan.name in self.config.child_pools
        return LocalWorkerGroup(ResourcePool(plan.process_on_nodes), recipe, **options)

    def check_restart(self, plan: PoolPlan) -> None:
        """Raise for a pool that has no process to restart."""
        if not self.has_own_processes(plan):
            raise PlacementError(
                f"pool '{plan.name}' cannot be restarted: it runs in the driver's own process. On "
                "trainer.backend=ray every pool has processes that can be restarted."
            )

    def leave(self, pool: str) -> None:
        """Release a pool's places on the cluster; its next start uses the places of its plan."""
        if pool in self._ray_pools:
            self._ray_pools.pop(pool).release()

    def release(self) -> None:
        """Release the places on the cluster, after the groups on them have ended."""
        for pool in self._ray_pools.values():
            pool.release()

    def _ray_pool(self, plan: PoolPlan) -> RayResourcePool:
        """Return the places of a pool: for a restart the same ones, unless they were released."""
        from verl_like.backends.ray import RayResourcePool

        if plan.name not in self._ray_pools:
            self._ray_pools[plan.name] = RayResourcePool(
                plan.process_on_nodes,
                use_gpu=plan.device_kind == "cuda",
                name_prefix=plan.name,
                cpus_per_process=plan.cpus_per_process,
                nodes=plan.nodes,
                deadlines=self.limits,
                gpus_per_process=plan.gpus_per_process,
                resources=plan.resources,
            )
        return self._ray_pools[plan.name]


def side_by_side(calls: Sequence[Callable[[], None]]) -> None:
    """Run these calls in a thread each, and wait for all.

    If some fail, the first error is raised with the others in its notes.
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
