"""Pools of processes, the nodes that they are on, and the manager of a run's pools.

A pool is a list of process counts, one per node: [2, 1] is three processes on two nodes. A backend
subclasses `ResourcePool` and `PoolManager` with what its cluster needs.

    {"actor_rollout": "main", "critic": "critic_pool"}     # role -> pool

A role is any string. An alias such as `actor_rollout` names several roles in one process. If the
mapping also has `rollout`, that entry decides the pool of the rollout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from verl_like.calls.deadlines import Deadlines
from verl_like.errors import PlacementError, nearest
from verl_like.process.info import ProcessInfo, new_secret


class Role:
    """The usual role names, for users of verl; any other string is a role as well."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "reward_model"
    ActorRolloutRef = "actor_rollout_ref"
    Env = "env"


ALIASES: dict[str, tuple[str, ...]] = {
    Role.ActorRollout: (Role.Actor, Role.Rollout),
    Role.ActorRolloutRef: (Role.Actor, Role.Rollout, Role.RefPolicy),
}


def expand_roles(role_mapping: Mapping[str, str]) -> dict[str, str]:
    """Return the mapping with its aliases expanded; of a role's entries, the narrowest one wins.

    The role's own name is the narrowest, then `actor_rollout`, then `actor_rollout_ref`.
    """
    expanded: dict[str, str] = {}
    widths: dict[str, int] = {}
    for name, pool in role_mapping.items():
        roles = roles_named(name)
        for role in roles:
            if len(roles) <= widths.get(role, len(roles)):
                expanded[role], widths[role] = pool, len(roles)
    return expanded


def roles_named(name: str) -> tuple[str, ...]:
    """Return the roles that a name in the mapping stands for; an alias stands for several."""
    return ALIASES.get(name, (name,))


def roles_by_pool(pools: Iterable[str], role_mapping: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the roles of every pool; raise if a pool does not exist or has no role."""
    roles: dict[str, list[str]] = {pool: [] for pool in pools}
    for role, pool in expand_roles(role_mapping).items():
        if pool not in roles:
            known = f" Pools: {', '.join(roles)}." if roles else ""
            other = f", or map the role: role_mapping.{role}={[*roles][0]}" if roles else ""
            raise PlacementError(
                f"role '{role}' is mapped to pool '{pool}', which does not "
                f"exist.{nearest(pool, roles)}{known} Add this pool with "
                f"resource_pool_spec.{pool}=[1], a list of its processes on each node{other}."
            )
        roles[pool].append(role)

    for pool, its_roles in roles.items():
        if not its_roles:
            raise PlacementError(
                f"pool '{pool}' has no role.{nearest(pool, set(roles) - {pool})} Map a role to it, "
                f"or drop the pool (~resource_pool_spec.{pool})."
            )
    return roles


@dataclass(frozen=True)
class NodeSpec:
    """A machine in a plan.

    Example:

        NodeSpec("host-1", devices=8, cpus=64, kind="GPU")

    Args:
        name: the name in messages, such as the host's.
        devices: number of GPUs, or of CPU slots on a node without GPUs.
        cpus: number of CPUs.
        kind: the kind of its devices: `GPU`, `CPU slot`, or `device` if they are not known yet.
        key: the backend's name of the node, such as Ray's node id.
        resources: custom resources; None if they are not known.
        labels: labels, such as its zone; None if they are not known.
    """

    name: str
    devices: int
    cpus: float
    kind: str = "CPU slot"
    key: str = ""
    resources: Mapping[str, float] | None = None
    labels: Mapping[str, str] | None = None


@dataclass(frozen=True)
class ProcessNeeds:
    """Resources that one process of a pool takes from its node."""

    device: str = "auto"
    """cpu, cuda, or auto: a GPU if the node has any."""
    cpus: float | None = None
    """None takes `cpus_per_process`, or an equal share of the CPUs that the other pools leave."""
    gpus: float | None = None
    """A fraction of a GPU; None takes a whole GPU."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Amounts of custom resources."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the node must have."""

    def devices_on(self, node: NodeSpec) -> float:
        """Return the devices of a node that a process takes: no GPU if it computes on CPUs."""
        if node.kind == "CPU slot":
            return 1.0
        return 0.0 if self.device == "cpu" else self.gpus or 1.0


def cpu_share(cpus: float, num_processes: int) -> float:
    """Return the CPUs per process, at most one, if `num_processes` processes share `cpus`.

    It is rounded down to ten-thousandths, Ray's smallest unit, so the sum never exceeds `cpus`.
    """
    return min(1.0, math.floor(cpus / num_processes * 1e4) / 1e4)


class ResourcePool:
    """A set of processes, with a number of processes per node.

    Example:

        pool = ResourcePool([2, 1])     # three processes on two nodes
        pool.world_size                 # 3
        pool.local_rank_list()          # [0, 1, 0]

    Args:
        process_on_nodes: processes per node; [1, 2] is three processes on two nodes.
        max_colocate_count: groups that may share the pool, in Ray.
        n_gpus_per_node: for verl's code, which reads it; it has no effect.

    Raises:
        PlacementError: a count in `process_on_nodes` is not an int of 1 or more.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        """Store the sizes; nothing starts."""
        is_list = isinstance(process_on_nodes, Sequence) and len(process_on_nodes) > 0
        if not is_list or any(type(n) is not int or n < 1 for n in process_on_nodes):
            raise PlacementError(
                "a pool needs a list of process counts per node, each 1 or more, not "
                f"{process_on_nodes}."
            )
        self.store = list(process_on_nodes)
        """The number of processes on each node."""
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    @classmethod
    def named(cls, name: str, process_on_nodes: Sequence[int]) -> ResourcePool:
        """Return the pool of the key `resource_pool_spec.<name>`; errors name that key."""
        try:
            return cls(list(process_on_nodes))
        except PlacementError as error:
            sizes = list(process_on_nodes)
            raise PlacementError(f"resource_pool_spec.{name}={sizes}: {error}") from None

    @property
    def world_size(self) -> int:
        """The number of processes on all nodes together."""
        return sum(self.store)

    def add_node(self, process_count: int) -> None:
        """Add a node with this many processes."""
        self.store.append(process_count)

    def local_world_size_list(self) -> list[int]:
        """Return for every rank the number of ranks on its node."""
        return [count for count in self.store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """Return for every rank its rank on its node."""
        return [local for count in self.store for local in range(count)]

    def node_list(self) -> list[int]:
        """Return for every rank its node's position in `store`."""
        return [node for node, count in enumerate(self.store) for _ in range(count)]

    def process_infos(
        self, name: str, deadlines: Deadlines | None = None, **settings: Any
    ) -> list[ProcessInfo]:
        """Return the `ProcessInfo` of each rank of a group of this name; all share a new secret."""
        limits, secret = deadlines or Deadlines(), new_secret()
        here = zip(self.local_rank_list(), self.local_world_size_list(), strict=True)
        return [
            ProcessInfo(
                name=name,
                rank=rank,
                world_size=self.world_size,
                local_rank=local_rank,
                local_world_size=local_world_size,
                rendezvous_s=limits.rendezvous_s,
                call_s=limits.call_s,
                collective_s=limits.collective_s,
                secret=secret,
                **settings,
            )
            for rank, (local_rank, local_world_size) in enumerate(here)
        ]

    def release(self) -> None:
        """Release what the pool reserved on a cluster."""

    def __enter__(self) -> Self:
        """Return the pool; reservations end with the `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release the pool."""
        self.release()

    def __repr__(self) -> str:
        """The name of the class, and the number of processes on each node."""
        return f"{type(self).__name__}({self.store})"


class PoolManager:
    """Creates the pools of a run, and maps every role to its pool."""

    pool_cls: ClassVar[type[ResourcePool]] = ResourcePool
    """The class of the pools."""

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[str, str],
    ) -> None:
        """Check that the roles and the pools fit.

        Args:
            resource_pool_spec: pool -> processes per node, such as {"global_pool": [8, 8]}.
            mapping: role -> its pool.

        Raises:
            PlacementError: `mapping` names a missing pool, or a pool has no role.
        """
        self.resource_pool_spec = {
            name: list(counts) for name, counts in resource_pool_spec.items()
        }
        self.mapping = dict(mapping)
        self.resource_pool_dict: dict[str, ResourcePool] = {}
        roles_by_pool(self.resource_pool_spec, self.mapping)

    def create_resource_pool(self) -> None:
        """Make the pools without starting anything."""
        self.resource_pool_dict = {
            name: self.pool_cls(counts) for name, counts in self.resource_pool_spec.items()
        }

    def get_resource_pool(self, role: str) -> ResourcePool:
        """Return the pool of a role or of an alias."""
        mapping = {**expand_roles(self.mapping), **self.mapping}
        if role not in mapping:
            raise PlacementError(
                f"role '{role}' is on no pool.{nearest(role, mapping)} Roles on a pool: "
                f"{', '.join(self.mapping)}."
            )
        if not self.resource_pool_dict:
            self.create_resource_pool()
        return self.resource_pool_dict[mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of processes in all pools."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())
