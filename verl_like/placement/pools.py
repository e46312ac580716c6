"""Where roles run: pools of devices, the mapping of roles to pools, and a plan that is checked
before a device is taken.

    spec    = {"actor_rollout_ref_pool": [2], "critic_pool": [1]}       # pool -> processes per node
    mapping = {"actor_rollout": "actor_rollout_ref_pool", "ref": "actor_rollout_ref_pool", "critic": "critic_pool"}
    placement = Placement.plan(spec, mapping, nodes=[Node("here", devices=4, cpus=4.0)])
    print(placement)

Devices are GPUs where they exist and CPU slots otherwise. Roles are strings: a new one needs no
list to be edited.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_like.errors import PlacementError, nearest
from verl_like.terminal import draw_table


class Role:
    """The usual role names, for people who come from verl; any other string is a role as well."""

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


def cpu_share(cpus: float, num_processes: int) -> float:
    """CPUs of one process when so many share `cpus`: one at most, rounded down to what a cluster
    can count.
    """
    return min(1.0, math.floor(cpus / num_processes * 1e4) / 1e4)


class ResourcePool:
    """A named set of processes: how many on each node."""

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        max_colocate_count: int = 10,
        n_gpus_per_node: int = 8,
    ) -> None:
        """`process_on_nodes` may be uneven, such as [1, 2]: that is three processes."""
        if not process_on_nodes or any(type(n) is not int or n < 1 for n in process_on_nodes):
            raise PlacementError(
                "a pool needs a list of process counts per node, each 1 or more; got "
                f"{list(process_on_nodes)}."
            )
        self._store = list(process_on_nodes)
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    @property
    def store(self) -> list[int]:
        """Processes per node."""
        return self._store

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return sum(self._store)

    def add_node(self, process_count: int) -> None:
        """One more node with that many processes."""
        self._store.append(process_count)

    def local_world_size_list(self) -> list[int]:
        """For every rank, the number of ranks on its node."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """For every rank, its number on its node."""
        return [local for count in self._store for local in range(count)]

    def node_list(self) -> list[int]:
        """For every rank, the position of its node in `store`."""
        return [node for node, count in enumerate(self._store) for _ in range(count)]


@dataclass(frozen=True)
class Node:
    """A machine as the plan sees it. `key` is the backend's own name for it."""

    name: str
    devices: int
    cpus: float
    kind: str = "CPU slot"
    key: str = ""


@dataclass(frozen=True)
class PoolPlan:
    """One pool, placed: on which node each of its entries goes, and which roles share its
    processes.
    """

    name: str
    process_on_nodes: tuple[int, ...]
    nodes: tuple[Node, ...]
    roles: tuple[str, ...]
    cpus_per_process: float

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return sum(self.process_on_nodes)


@dataclass(frozen=True)
class Placement:
    """Pools that fit on the nodes, and the role table. Prints as a table."""

    pools: dict[str, PoolPlan]

    @classmethod
    def plan(
        cls,
        resource_pool_spec: Mapping[str, Sequence[int]],
        role_mapping: Mapping[str, str],
        nodes: Sequence[Node],
        cpus_per_process: float | None = None,
    ) -> Placement:
        """Check everything that can be checked without starting
        anything, and say who goes where.
        """
        counts = {
            name: list(ResourcePool(list(per_node)).store)
            for name, per_node in resource_pool_spec.items()
        }
        roles = _roles_by_pool(counts, role_mapping)
        num_processes = sum(map(sum, counts.values()))
        given = cpus_per_process
        cpus = (
            cpu_share(sum(node.cpus for node in nodes), num_processes) if given is None else given
        )
        if cpus <= 0:
            raise PlacementError(f"cpus_per_process must be above 0, got {cpus}.")
        free = {i: [node.devices, node.cpus] for i, node in enumerate(nodes)}
        plans = {}
        for pool, per_node in counts.items():
            chosen = _choose_nodes(pool, per_node, nodes, free, cpus)
            plans[pool] = PoolPlan(
                pool, tuple(per_node), tuple(nodes[i] for i in chosen), tuple(roles[pool]), cpus
            )
        return cls(plans)

    @property
    def role_mapping(self) -> dict[str, str]:
        """Role to pool."""
        return {role: plan.name for plan in self.pools.values() for role in plan.roles}

    def __str__(self) -> str:
        return self.draw()

    def draw(self, width: int | None = None) -> str:
        """The plan as a table, no wider than `width` columns."""
        rows = [("pool", "node", "devices", "roles", "processes", "CPUs")]
        for plan in self.pools.values():
            for count, node in zip(plan.process_on_nodes, plan.nodes, strict=True):
                plural = "" if count == 1 else "s"
                cpus = f"{count * plan.cpus_per_process:g}"
                rows.append(
                    (
                        plan.name,
                        node.name,
                        f"{count} {node.kind}{plural}",
                        ", ".join(plan.roles),
                        str(count),
                        cpus,
                    )
                )
        return "\n".join(draw_table(rows, width))


def expand_roles(role_mapping: Mapping[str, str]) -> dict[str, str]:
    """The mapping with aliases such as `actor_rollout` written out; naming a role twice is an
    error.
    """
    expanded: dict[str, str] = {}
    for role, pool in role_mapping.items():
        for part in ALIASES.get(role, (role,)):
            if part in expanded:
                raise PlacementError(
                    f"role '{part}' is mapped twice: by its own name and by an alias such as "
                    f"'{role}'. Keep one of them."
                )
            expanded[part] = pool
    return expanded


def _roles_by_pool(
    pools: Mapping[str, Sequence[int]], role_mapping: Mapping[str, str]
) -> dict[str, list[str]]:
    roles: dict[str, list[str]] = {pool: [] for pool in pools}
    for role, pool in expand_roles(role_mapping).items():
        if pool not in roles:
            raise PlacementError(
                f"role '{role}' is mapped to pool '{pool}', which does not "
                f"exist.{nearest(pool, pools)} Pools: {', '.join(pools)}."
            )
        roles[pool].append(role)
    for pool, its_roles in roles.items():
        if not its_roles:
            raise PlacementError(
                f"pool '{pool}' has no role. Map one to it, or drop the pool "
                f"(~resource_pool_spec.{pool})."
            )
    return roles


def _choose_nodes(
    pool: str,
    per_node: Sequence[int],
    nodes: Sequence[Node],
    free: dict[int, list[float]],
    cpus: float,
) -> list[int]:
    """A node of its own for every entry of the pool, first fit."""
    chosen: list[int] = []
    for count in per_node:
        fitting = [
            i
            for i in free
            if i not in chosen and free[i][0] >= count and free[i][1] + 1e-9 >= count * cpus
        ]
        if not fitting:
            raise PlacementError(
                _does_not_fit(pool, count, len(per_node), nodes, free, cpus, chosen)
            )
        free[fitting[0]][0] -= count
        free[fitting[0]][1] -= count * cpus
        chosen.append(fitting[0])
    return chosen


def _does_not_fit(
    pool: str,
    count: int,
    num_entries: int,
    nodes: Sequence[Node],
    free: dict[int, list[float]],
    cpus: float,
    chosen: Sequence[int],
) -> str:
    state = "; ".join(
        f"{nodes[i].name}: {d:g} of {nodes[i].devices} {nodes[i].kind}s and {c:g} of "
        f"{nodes[i].cpus:g} CPUs free"
        + (" (holds another part of this pool)" if i in chosen else "")
        for i, (d, c) in free.items()
    )
    short_of_cpus = any(
        d >= count and c + 1e-9 < count * cpus for i, (d, c) in free.items() if i not in chosen
    )
    way_out = (
        f"set cpus_per_process below {cpus:g}"
        if short_of_cpus
        else "use fewer processes, or let roles share a pool (placement=colocate)"
    )
    return (
        f"pool '{pool}' needs {num_entries} node(s), one with {count} processes of {cpus:g} CPU "
        f"each, and none has room: {state}. To mend it, {way_out}."
    )


class ResourcePoolManager:
    """verl's holder of pools and mapping: makes every pool once and answers which one a role lives
    on.
    """

    def __init__(
        self,
        resource_pool_spec: Mapping[str, Sequence[int]],
        mapping: Mapping[str, str],
        pool_cls: type[ResourcePool] | None = None,
    ):
        """`pool_cls` is what `create_resource_pool` makes; unless given, a `RayResourcePool`."""
        self.resource_pool_spec = {
            name: list(counts) for name, counts in resource_pool_spec.items()
        }
        self.mapping = dict(mapping)
        self.pool_cls = pool_cls
        self.resource_pool_dict: dict[str, ResourcePool] = {}
        _roles_by_pool(self.resource_pool_spec, self.mapping)

    def create_resource_pool(self) -> None:
        """Make the pools; nothing is started yet."""
        if self.pool_cls is None:
            from verl_like.backends.ray import RayResourcePool

            self.pool_cls = RayResourcePool
        self.resource_pool_dict = {
            name: self.pool_cls(counts) for name, counts in self.resource_pool_spec.items()
        }

    def get_resource_pool(self, role: str) -> ResourcePool:
        """The pool a role is mapped to, by its own name or an alias."""
        mapping = {**expand_roles(self.mapping), **self.mapping}
        if role not in mapping:
            raise PlacementError(
                f"role '{role}' is on no pool.{nearest(role, mapping)} Mapped: "
                f"{', '.join(self.mapping)}."
            )
        if not self.resource_pool_dict:
            self.create_resource_pool()
        return self.resource_pool_dict[mapping[role]]

    def get_n_gpus(self) -> int:
        """Devices of all pools together."""
        return sum(sum(counts) for counts in self.resource_pool_spec.values())
