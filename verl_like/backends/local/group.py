"""The backend without a cluster: a pool of one process is the caller's own thread, a larger one is
child processes.

`LocalWorkerGroup` takes what `RayWorkerGroup` takes and gives the same numbers, bit for bit. In the
caller's thread `breakpoint()` in a worker works; a call then runs when it is made, and a future
keeps its result or its error. The child processes are in
`verl_like.backends.local.child_transport`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from verl_like.backends.local.child_transport import ChildTransport, Done, regroup_here
from verl_like.batch.protocol import DataProto
from verl_like.calls.group import ClassWithInitArgs, WorkerGroup, method_table
from verl_like.calls.transport import Call, Pending, Transport
from verl_like.calls.waiting import Deadlines, wait_for_calls
from verl_like.errors import ConfigError, WorkerError
from verl_like.placement.pools import ResourcePool
from verl_like.process.environment import checked_worker_env
from verl_like.process.host import HostFacts, Recipes, WorkerHost
from verl_like.process.worker import Worker


class InlineTransport(Transport):
    """One process: the caller's, in the caller's thread.

    Values are copied on the way in and out.
    """

    kind = "local"

    def __init__(
        self,
        recipes: Recipes,
        facts: HostFacts,
        deadlines: Deadlines,
        neighbours: dict[str, Worker],
    ):
        """Constructs the roles at once; `neighbours` holds the roles of every inline pool, which
        are siblings.
        """
        super().__init__([facts], deadlines)
        self.process_key = id(neighbours)
        self.host = WorkerHost(copy.deepcopy(recipes), facts, neighbours)
        header = Done(self.host.start(None))
        self.started = wait_for_calls(
            self, f"start of {facts.name}", [Pending(0, header, header, facts.name)]
        )

    def submit(self, rank: int, call: Call, parts: Sequence[Any]) -> Pending:
        """Runs the call now."""
        isolated = copy.deepcopy(call)
        given = [self.fetch(part) if isinstance(part, Done | Future) else part for part in parts]
        payload, header = self.host.call(isolated, given)
        payload = (
            payload.writable_copy() if isinstance(payload, DataProto) else copy.deepcopy(payload)
        )
        return Pending(rank, Done(payload), Done(header), call.role)

    def wait(self, references: Sequence[Any], seconds: float) -> list[Any]:
        """Everything is there."""
        return list(references)

    def fetch(self, reference: Any) -> Any:
        """The value."""
        return reference.value if isinstance(reference, Done) else reference.result()

    def stacks(self, seconds: float) -> dict[int, str]:
        """The caller's own stack is where it waits."""
        return {0: self.host.stacks()}

    def regroup(
        self, pending: Sequence[Pending], num_pieces: int, even: bool = True
    ) -> list[Pending]:
        """Cut again, here."""
        return regroup_here(self, pending, num_pieces, even)

    def place(self, rank: int) -> str:
        """Here."""
        return "in the caller's thread"

    def shutdown(self) -> None:
        """Nothing runs between calls; logs are closed."""
        self.host.close()


class LocalWorkerGroup(WorkerGroup):
    """A worker group of this process (a pool of one) or of child processes (a larger pool)."""

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
        device_kind: str = "cpu",
        neighbours: dict[str, Worker] | None = None,
    ) -> None:
        """Arguments as for `RayWorkerGroup`; groups given the same `neighbours` are siblings when
        they run inline.
        """
        roles = ray_cls_with_init.roles(name_prefix)
        classes = {role: made.cls for role, made in roles.items()}
        method_table(classes, ray_cls_with_init.fused)
        recipes: Recipes = {
            role: (made.cls, made.args, made.kwargs) for role, made in roles.items()
        }
        limits, size, env = (
            deadlines or Deadlines(),
            resource_pool.world_size,
            checked_worker_env(worker_env),
        )
        facts = [
            HostFacts(
                "+".join(roles),
                rank,
                size,
                local,
                device_kind,
                seed,
                log_dir,
                limits.rendezvous_s,
                limits.call_s,
            )
            for rank, local in enumerate(resource_pool.local_rank_list())
        ]
        transport: Transport
        if size == 1 and env:
            raise ConfigError(
                "worker_env: a local pool of one process is this very process; set os.environ "
                "instead."
            )
        if size == 1:
            transport = InlineTransport(
                recipes, facts[0], limits, {} if neighbours is None else neighbours
            )
        elif device_kind != "cpu":
            raise WorkerError(
                "backend=local runs several processes on CPUs only; use backend=ray for several "
                "GPUs."
            )
        else:
            transport = ChildTransport(recipes, facts, limits, env, master_port)
        super().__init__(transport, classes, prefixed=ray_cls_with_init.fused)
