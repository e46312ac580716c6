"""The plan of a run: which pool lies on which nodes and holds which roles, checked and printed.

    spec = {"actor_rollout_ref_pool": [2], "critic_pool": [1]}    # pool -> processes per node
    mapping = {
        "actor_rollout": "actor_rollout_ref_pool",
        "ref": "actor_rollout_ref_pool",
        "critic": "critic_pool",
    }
    placement = Placement.plan(spec, mapping, nodes=[Node("here", devices=4, cpus=4.0)])
    print(placement)

Nothing is started for it: what does not fit is refused before a device is taken. Devices are GPUs
where they exist and CPU slots otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from verl_like.errors import PlacementError
from verl_like.placement.pools import Node, ResourcePool, cpu_share
from verl_like.placement.roles import roles_by_pool
from verl_like.terminal import draw_table

ROUNDING = 1e-9
"""CPUs by which a sum of shares may exceed what a node has."""


@dataclass(frozen=True)
class PoolPlan:
    """One pool, placed: the node of each of its entries, and the roles in its processes."""

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
    """Pools that fit on the nodes, and the roles on them. Prints as a table."""

    pools: dict[str, PoolPlan]

    @classmethod
    def plan(
        cls,
        resource_pool_spec: Mapping[str, Sequence[int]],
        role_mapping: Mapping[str, str],
        nodes: Sequence[Node],
        cpus_per_process: float | None = None,
    ) -> Placement:
        """Check all that can be checked without starting anything, and say who goes where."""
        counts = {
            name: list(ResourcePool(list(per_node)).store)
            for name, per_node in resource_pool_spec.items()
        }
        roles = roles_by_pool(counts, role_mapping)

        cpus = cpus_per_process
        if cpus is None:
            cpus = cpu_share(sum(node.cpus for node in nodes), sum(map(sum, counts.values())))
        if cpus <= 0:
            raise PlacementError(f"cpus_per_process must be above 0, got {cpus}.")

        rooms = [_Room(node) for node in nodes]
        plans = {}
        for pool, per_node in counts.items():
            chosen = _choose_nodes(pool, per_node, rooms, cpus)
            plans[pool] = PoolPlan(pool, tuple(per_node), chosen, tuple(roles[pool]), cpus)
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
            roles = ", ".join(plan.roles)
            for count, node in zip(plan.process_on_nodes, plan.nodes, strict=True):
                devices = f"{count} {node.kind}{'' if count == 1 else 's'}"
                cpus = f"{count * plan.cpus_per_process:g}"
                rows.append((plan.name, node.name, devices, roles, str(count), cpus))
        return "\n".join(draw_table(rows, width))


class _Room:
    """What is still free on a node while a plan is made."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.devices = node.devices
        self.cpus = node.cpus

    def has_devices(self, count: int) -> bool:
        return self.devices >= count

    def has_cpus(self, cpus: float) -> bool:
        return self.cpus + ROUNDING >= cpus

    def take(self, count: int, cpus: float) -> None:
        self.devices -= count
        self.cpus -= cpus

    def __str__(self) -> str:
        node = self.node
        return (
            f"{node.name}: {self.devices} of {node.devices} {node.kind}s and {self.cpus:g} of "
            f"{node.cpus:g} CPUs free"
        )


def _choose_nodes(
    pool: str, per_node: Sequence[int], rooms: Sequence[_Room], cpus: float
) -> tuple[Node, ...]:
    """A node of its own for every entry of the pool, first fit; what they need is taken."""
    chosen: list[_Room] = []
    for count in per_node:
        others = [room for room in rooms if room not in chosen]
        with_devices = [room for room in others if room.has_devices(count)]
        fitting = [room for room in with_devices if room.has_cpus(count * cpus)]
        if not fitting:
            way_out = "use fewer processes, or let roles share a pool (placement=colocate)"
            if with_devices:
                way_out = f"set cpus_per_process below {cpus:g}"
            raise PlacementError(
                f"pool '{pool}' needs {len(per_node)} node(s), one with {count} processes of "
                f"{cpus:g} CPU each, and none has room: {_shown(rooms, chosen)}. To mend it, "
                f"{way_out}."
            )
        fitting[0].take(count, count * cpus)
        chosen.append(fitting[0])
    return tuple(room.node for room in chosen)


def _shown(rooms: Sequence[_Room], chosen: Sequence[_Room]) -> str:
    """What every node has left, and which ones hold a part of the pool already."""
    shown = []
    for room in rooms:
        note = " (holds another part of this pool)" if room in chosen else ""
        shown.append(f"{room}{note}")
    return "; ".join(shown)
