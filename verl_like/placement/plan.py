"""The plan of a run, checked and printed: the nodes and the roles of each pool.

    spec = {"actor_rollout_ref_pool": [2], "critic_pool": [1]}    # pool -> processes per node
    mapping = {
        "actor_rollout": "actor_rollout_ref_pool",
        "ref": "actor_rollout_ref_pool",
        "critic": "critic_pool",
    }
    placement = Placement.plan(spec, mapping, nodes=[NodeSpec("here", devices=4, cpus=4.0)])
    print(placement)

Making a plan starts nothing: a placement that does not fit is rejected before any device is
allocated. Devices are GPUs where they exist and CPU slots otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from verl_like.errors import InsufficientResourcesError, PlacementError, join_few
from verl_like.placement.pools import NodeSpec, ProcessNeeds, ResourcePool, cpu_share, roles_by_pool
from verl_like.terminal import draw_table

NODES_ALONE = 8
"""If a pool has more nodes than this, `Placement.draw` joins runs of similar nodes into one row."""
NEARNESS = (
    *("ray.io/gpu-domain", "ray.io/tpu-slice-name", "rack"),
    *("ray.io/availability-zone", "ray.io/availability-region"),
)
"""Labels of nodes whose equal values mean fast links, the fastest first."""
ROUNDING = 1e-9
"""Tolerance for sums of fractional resources that must not exceed a node's amount."""


@dataclass(frozen=True)
class PoolPlan:
    """One placed pool: its processes per node, the nodes, and the roles in each process."""

    name: str
    process_on_nodes: tuple[int, ...]
    nodes: tuple[NodeSpec, ...]
    roles: tuple[str, ...]
    cpus_per_process: float
    gpus_per_process: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    """Custom resources of one process."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that its nodes must have."""

    @property
    def device_kind(self) -> str:
        """ "cpu" or "cuda", the devices that the pool's processes compute on."""
        return "cuda" if self.gpus_per_process else "cpu"

    @property
    def world_size(self) -> int:
        """The number of processes on all nodes together."""
        return sum(self.process_on_nodes)

    @property
    def needs(self) -> ProcessNeeds:
        """Resources that one process takes from its node."""
        gpus = self.gpus_per_process or None
        return ProcessNeeds(
            self.device_kind, self.cpus_per_process, gpus, self.resources, self.labels
        )


@dataclass(frozen=True)
class Placement:
    """Pools that fit on the nodes, with their roles. `print` shows them as a table.

    Example:

        nodes = [NodeSpec("host", devices=4, cpus=16)]
        roles = {"actor_rollout": "policy_pool", "critic": "critic_pool"}
        print(Placement.plan({"policy_pool": [2], "critic_pool": [2]}, roles, nodes))

    Args:
        pools: pool -> its processes per node, its nodes and its roles.
    """

    pools: dict[str, PoolPlan]

    @classmethod
    def plan(
        cls,
        resource_pool_spec: Mapping[str, Sequence[int]],
        role_mapping: Mapping[str, str],
        nodes: Sequence[NodeSpec],
        cpus_per_process: float | None = None,
        needs: Mapping[str, ProcessNeeds] | None = None,
    ) -> Placement:
        """Choose the nodes of every pool, after all checks that need no started process.

        Args:
            resource_pool_spec: pool -> processes per node, such as {"actor_pool": [2]}.
            role_mapping: role -> its pool.
            nodes: the nodes to choose from.
            cpus_per_process: CPUs of a process; None takes an equal share of all, at most one.
            needs: pool -> the resources of one process; by default one device and the CPUs above.

        Raises:
            PlacementError: a pool has no role, a role's pool does not exist, a process count is
                below 1, or `cpus_per_process` is not above 0.
            InsufficientResourcesError: the nodes lack devices, CPUs or custom resources.
        """
        counts = {
            pool: list(ResourcePool.named(pool, per_node).store)
            for pool, per_node in resource_pool_spec.items()
        }
        roles = roles_by_pool(counts, role_mapping)
        settled = _needs_with_cpus(counts, needs or {}, nodes, cpus_per_process)

        rooms = [_Room(node) for node in nodes]
        plans = {}
        # other pools leave the nodes to those that need a label or a resource
        for pool in sorted(
            counts, key=lambda pool: not (settled[pool].labels or settled[pool].resources)
        ):
            per_node, need = counts[pool], settled[pool]
            chosen = _choose_nodes(pool, counts, rooms, need)
            gpus = need.devices_on(chosen[0]) if chosen[0].kind == "GPU" else 0.0
            parts = tuple(per_node), chosen, tuple(roles[pool])
            plans[pool] = PoolPlan(
                pool, *parts, need.cpus or 0.0, gpus, need.resources, need.labels
            )
        return cls({pool: plans[pool] for pool in counts})

    def moved(self, pool: str, nodes: Sequence[NodeSpec]) -> Placement:
        """Return the plan after a loss of nodes; `nodes` are the remaining ones.

        The pool moves to nodes where the other pools leave room, preferably to its old ones.
        """
        plan, rooms = self.pools[pool], {node.key: _Room(node) for node in nodes}
        for other in [other for other in self.pools.values() if other is not plan]:
            for count, node in zip(other.process_on_nodes, other.nodes, strict=True):
                if node.key in rooms:
                    rooms[node.key].reserve(count, other.needs)

        pool_nodes = [node.key for node in plan.nodes]
        lost = [f"{node.name} ({node.key[:8]})" for node in plan.nodes if node.key not in rooms]
        pool_nodes_first = sorted(rooms.values(), key=lambda room: room.node.key not in pool_nodes)
        sizes = {pool: plan.process_on_nodes}
        try:
            chosen = _choose_nodes(pool, sizes, pool_nodes_first, plan.needs)
        except InsufficientResourcesError as error:
            event = f"lost node(s) {', '.join(lost)}: " if lost else ""
            raise InsufficientResourcesError(f"{event}{error}") from None
        return Placement({**self.pools, pool: replace(plan, nodes=chosen)})

    @property
    def role_mapping(self) -> dict[str, str]:
        """The pool name of every role."""
        return {role: plan.name for plan in self.pools.values() for role in plan.roles}

    def __str__(self) -> str:
        return self.draw(folds=False)

    def draw(
        self,
        notes: Mapping[str, str] | None = None,
        folds: bool = True,
    ) -> str:
        """Return the plan as a table, with `notes` after the roles.

        A single node is not named. With `folds`, runs of similar nodes become one row if a pool has
        more than `NODES_ALONE`.
        """
        rows = [("pool", "node", "devices", "roles", "processes", "CPUs")]
        for plan in self.pools.values():
            labels = {role: f"{role} ({note})" for role, note in (notes or {}).items()}
            roles = ", ".join(labels.get(role, role) for role in plan.roles)
            for first, last, alike in _runs(plan, folds):
                count, node = plan.process_on_nodes[first], plan.nodes[first].name
                if alike > 1:
                    node = f"{node} to {plan.nodes[last].name}"
                times = f"{alike} x " if alike > 1 else ""
                devices = times + _describe_devices(plan, plan.nodes[first], count)
                cpus = f"{times}{count * plan.cpus_per_process:g}"
                rows.append((plan.name, node, devices, roles, f"{times}{count}", cpus))
        only_node = rows[1][1] if len({row[1] for row in rows}) == 2 else None
        return "\n".join(draw_table(rows, zero=only_node))


def _runs(plan: PoolPlan, folds: bool) -> Iterator[tuple[int, int, int]]:
    """Yield the first entry, the last entry and the number of entries of each row of the table."""
    entries = range(len(plan.nodes))
    if not folds or len(entries) <= NODES_ALONE:
        yield from ((entry, entry, 1) for entry in entries)
        return
    for _, run in groupby(entries, lambda n: (plan.process_on_nodes[n], plan.nodes[n].kind)):
        alike = list(run)
        yield alike[0], alike[-1], len(alike)


def _describe_devices(plan: PoolPlan, node: NodeSpec, num_processes: int) -> str:
    """Return what a pool's processes take from a node besides CPUs: "2 GPUs, 2 accel"."""
    kind, amount = node.kind, float(num_processes)
    if node.kind == "GPU":
        on_gpus = plan.gpus_per_process > 0
        kind = "GPU" if on_gpus else "CPU slot"
        amount *= plan.gpus_per_process if on_gpus else 1.0
    words = [f"{amount:g} {kind}{'' if amount == 1 else 's'}"]
    words += [f"{num_processes * needs:g} {name}" for name, needs in plan.resources.items()]
    return ", ".join(words)


def _needs_with_cpus(
    counts: Mapping[str, Sequence[int]],
    needs: Mapping[str, ProcessNeeds],
    nodes: Sequence[NodeSpec],
    cpus_per_process: float | None,
) -> dict[str, ProcessNeeds]:
    """Return every pool's needs, with CPUs from its settings or an equal share."""
    if cpus_per_process is not None and cpus_per_process <= 0:
        raise PlacementError(f"cpus_per_process must be above 0, but is {cpus_per_process}.")
    result = {pool: needs.get(pool, ProcessNeeds()) for pool in counts}
    total = sum(node.cpus for node in nodes)
    left, num_others = total, 0
    for pool, need in result.items():
        left -= sum(counts[pool]) * (need.cpus or 0.0)
        num_others += sum(counts[pool]) if need.cpus is None else 0

    cpus = cpus_per_process
    if cpus is None and num_others:
        cpus = cpu_share(left, num_others)
        if cpus <= 0:
            raise InsufficientResourcesError(
                f"pool_resources takes {total - left:g} of {total:g} CPUs and leaves too few "
                f"for the other pools (processes: {num_others}). Lower pool_resources.<pool>.cpus, "
                "or set it for every pool."
            )
    return {pool: replace(need, cpus=need.cpus or cpus) for pool, need in result.items()}


class _Room:
    """The free resources of a node while a plan is made."""

    def __init__(self, node: NodeSpec) -> None:
        self.node = node
        self.devices = float(node.devices)
        self.cpus = node.cpus
        self.resources = dict(node.resources or {})

    def lacks(self, count: int, need: ProcessNeeds) -> str:
        """Name the label, or the resource, that `count` processes lack; "" if they fit."""
        for name, value in need.labels.items():
            labels = self.node.labels
            if labels is not None and labels.get(name) != value:
                return f"{name}={value}"
        if need.device == "cuda" and self.node.kind == "CPU slot":
            return "GPUs"
        if self.devices + ROUNDING < count * need.devices_on(self.node):
            return "devices"
        for name, amount in need.resources.items():
            is_known = self.node.resources is not None
            if is_known and self.resources.get(name, 0.0) + ROUNDING < count * amount:
                return name
        return "" if self.cpus + ROUNDING >= count * (need.cpus or 0.0) else "CPUs"

    def reserve(self, count: int, need: ProcessNeeds) -> None:
        self.devices -= count * need.devices_on(self.node)
        self.cpus -= count * (need.cpus or 0.0)
        for name, amount in need.resources.items():
            self.resources[name] = self.resources.get(name, 0.0) - count * amount

    @property
    def free_resources(self) -> str:
        node = self.node
        text = (
            f"{self.devices:g} of {node.devices} {node.kind}s and {self.cpus:g} of "
            f"{node.cpus:g} CPUs free"
        )
        custom = (node.resources or {}).items()
        extras = [f"{self.resources[name]:g} of {amount:g} {name}" for name, amount in custom]
        return ", ".join([text, *extras])


def _choose_nodes(
    pool: str, counts: Mapping[str, Sequence[int]], rooms: Sequence[_Room], need: ProcessNeeds
) -> tuple[NodeSpec, ...]:
    """Return a separate node for every entry of the pool, and reserve its needs.

    If the pool fits on nodes that are near each other by their labels, it gets such nodes.
    """
    per_node, chosen = counts[pool], list[_Room]()
    for near in _neighborhoods(rooms) if len(per_node) > 1 else [rooms]:
        chosen = _first_fit(near, per_node, need)
        if len(chosen) == len(per_node):
            break
    for count, room in zip(per_node, chosen, strict=False):
        room.reserve(count, need)
    if len(chosen) < len(per_node):
        count = per_node[len(chosen)]
        lacking = [room.lacks(count, need) for room in rooms if room not in chosen]
        needs = [f"{need.cpus:g} CPU"]
        needs += [f"{amount:g} {name}" for name, amount in need.resources.items()]
        remedy = _remedy(pool, need, lacking) or _more_devices(pool, counts, rooms)
        raise InsufficientResourcesError(
            f"pool '{pool}' needs {len(per_node)} node(s), and no "
            f"{'other ' if chosen else ''}node has room for {count} of its processes, with "
            f"{' and '.join(needs)} each: "
            f"{_describe_rooms(rooms, chosen)}. To fix it, {remedy}."
        )
    return tuple(room.node for room in chosen)


def _neighborhoods(rooms: Sequence[_Room]) -> Iterator[list[_Room]]:
    """Yield the nodes with the same value of each label in `NEARNESS`, and then all nodes."""
    for name in NEARNESS:
        near: dict[str, list[_Room]] = {}
        for room in rooms:
            value = (room.node.labels or {}).get(name)
            if value:
                near.setdefault(value, []).append(room)
        yield from near.values()
    yield list(rooms)


def _first_fit(rooms: Sequence[_Room], per_node: Sequence[int], need: ProcessNeeds) -> list[_Room]:
    """Return the first node with room for each entry, as far as there is one."""
    chosen: list[_Room] = []
    for count in per_node:
        fitting = [r for r in rooms if r not in chosen and not r.lacks(count, need)]
        if not fitting:
            break
        chosen.append(fitting[0])
    return chosen


def _remedy(pool: str, need: ProcessNeeds, lacking: Sequence[str]) -> str:
    """Return advice for a pool that lacks a label, CPUs, a custom resource or any GPU, or "".

    `lacking` names the missing resource of every node that the pool does not use yet.
    """
    key = f"pool_resources.{pool}"
    for name, value in need.labels.items():
        if f"{name}={value}" in lacking:
            return f"start Ray there with --labels={name}={value}, or change {key}.labels"
    for name in need.resources:
        if name in lacking:
            return f"lower {key}.resources.{name}, or start Ray on the nodes with that resource"
    if "CPUs" in lacking:
        return (
            f"set cpus_per_process below {need.cpus:g}, or {key}.cpus if the pool sets its own "
            "number"
        )
    if set(lacking) == {"GPUs"}:
        return f"set trainer.device=cpu or {key}.device=cpu"
    return ""


def _more_devices(pool: str, counts: Mapping[str, Sequence[int]], rooms: Sequence[_Room]) -> str:
    """Return advice for a pool that has more entries than nodes, or that lacks devices."""
    if len(counts[pool]) > len(rooms):
        return (
            f"list one number in resource_pool_spec.{pool} for each of the {len(rooms)} node(s), "
            "or add nodes (trainer.nnodes, or join a larger cluster)"
        )
    fewer = "use fewer processes, or let roles share a pool (placement, role_mapping)"
    if all(room.node.kind == "GPU" and room.node.key for room in rooms):
        return fewer  # the cluster decides the number of devices, not the configuration
    enough = sum(max(per_node) for per_node in counts.values())
    return f"set trainer.n_gpus_per_node={enough}, the devices of a node for all pools, or {fewer}"


def _describe_rooms(rooms: Sequence[_Room], chosen: Sequence[_Room]) -> str:
    """Describe the free resources of every node and mark nodes that the pool already uses.

    Nodes with equal descriptions are named together.
    """
    names: dict[str, list[str]] = {}
    for room in rooms:
        note = " (holds another part of this pool)" if room in chosen else ""
        names.setdefault(f"{room.free_resources}{note}", []).append(room.node.name)
    return "; ".join(f"{join_few(of, 2)}: {left}" for left, of in names.items())
