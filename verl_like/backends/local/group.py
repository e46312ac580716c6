"""`LocalWorkerGroup`: a worker group without a cluster.

It takes what `RayWorkerGroup` takes and gives the same numbers, bit for bit. A pool of one process
is the caller's own thread (`inline`), unless it is to run beside that; such a one and larger pools
are child processes (`children`).
"""

from __future__ import annotations

from collections.abc import Mapping

from verl_like.backends.local.children import ChildTransport
from verl_like.backends.local.inline import InlineTransport
from verl_like.calls.diagnose import Deadlines
from verl_like.calls.group import WorkerGroup, method_table
from verl_like.calls.transport import Transport
from verl_like.calls.worker_classes import ClassWithInitArgs
from verl_like.errors import ConfigError, PlacementError, WorkerError
from verl_like.placement.pools import ResourcePool
from verl_like.process.environment import checked_worker_env
from verl_like.process.facts import ProcessFacts
from verl_like.process.host import Recipes
from verl_like.process.store import new_secret
from verl_like.process.worker import Worker


class LocalWorkerGroup(WorkerGroup):
    """A worker group of this process, or of child processes."""

    def __init__(
        self,
        resource_pool: ResourcePool,
        ray_cls_with_init: ClassWithInitArgs,
        *,
        name_prefix: str = "worker",
        worker_env: Mapping[str, str] | None = None,
        deadlines: Deadlines | None = None,
        seed: int = 0,
        log_dir: str | None = None,
        master_port: int = 0,
        device_name: str = "cpu",
        neighbours: dict[str, Worker] | None = None,
        own_processes: bool = False,
        detached: bool = False,
    ) -> None:
        """Arguments as for `RayWorkerGroup`.

        With `own_processes` a pool of one is a child process, too. Groups that are given the same
        `neighbours` are siblings when they run inline.
        """
        if detached:
            raise PlacementError(
                "detached=True: processes of the local backend end with their driver; take "
                "RayWorkerGroup."
            )

        roles = ray_cls_with_init.roles(name_prefix)
        classes = {role: made.cls for role, made in roles.items()}
        method_table(classes, ray_cls_with_init.prefixed)
        recipes: Recipes = {
            role: (made.cls, made.args, made.kwargs) for role, made in roles.items()
        }

        limits, env = deadlines or Deadlines(), checked_worker_env(worker_env)
        facts = resource_pool.facts(
            "+".join(roles),
            device_kind=device_name,
            seed=seed,
            log_dir=log_dir,
            rendezvous_s=limits.rendezvous_s,
            call_s=limits.call_s,
            collective_s=limits.collective_s,
            secret=new_secret(),
        )

        transport: Transport
        if resource_pool.world_size == 1 and not own_processes:
            _refuse_environment(env)
            siblings = {} if neighbours is None else neighbours
            transport = InlineTransport(recipes, facts[0], limits, siblings)
        else:
            _refuse_gpus(facts[0])
            transport = ChildTransport(recipes, facts, limits, env, master_port)
        super().__init__(transport, classes, prefixed=ray_cls_with_init.prefixed)


def _refuse_environment(env: Mapping[str, str]) -> None:
    """Variables for workers in the caller's own process."""
    if env:
        raise ConfigError(
            "worker_env: a local pool of one process is this very process; set os.environ instead."
        )


def _refuse_gpus(facts: ProcessFacts) -> None:
    """Child processes that this one starts would all compute on the same GPU."""
    if facts.device_kind != "cpu":
        raise WorkerError(
            f"backend=local has child processes on CPUs only, and {facts.name} would be "
            f"{facts.world_size} of them on GPUs. Use backend=ray, or trainer.device=cpu."
        )
