"""Pools on a Ray cluster: placement groups with unique names and a bounded wait."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl_like.backends.ray.cluster import (
    RELEASE_S,
    amounts,
    connect,
    describe_shortage,
    living_nodes,
    within,
)
from verl_like.calls.deadlines import Deadlines, WaitClock
from verl_like.errors import PlacementError, WaitTimeoutError
from verl_like.placement.plan import ROUNDING
from verl_like.placement.pools import NodeSpec, PoolManager, ResourcePool, cpu_share


@dataclass(frozen=True)
class Bundle:
    """The place of one process: a bundle of a placement group."""

    group: PlacementGroup
    index: int
    cpus: float
    gpus: float
    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources."""


PENDING_S = 10.0
"""Seconds of a wait for places after which the first warning says what is missing."""


class RayResourcePool(ResourcePool):
    """A pool on a Ray cluster, which is reserved when the first worker group needs it.

    Example:

        pool = RayResourcePool([8, 8], use_gpu=True)        # 8 processes on each of two nodes

    Args:
        process_on_nodes: processes per node, such as [2, 1].
        use_gpu: whether the processes use GPUs; None uses them if the cluster has any.
        name_prefix: the start of the pool's unique name.
        max_colocate_count: groups that may share the pool; a process of each gets 1 /
            `max_colocate_count` of its place.
        accelerator_type: Ray's name of a GPU model, such as "H100"; None takes any.
        cpus_per_process: CPUs per place; None takes an equal share, at most one.
        nodes: a node for each entry of `process_on_nodes`; by default, each entry gets its own
            node if enough nodes fit.
        deadlines: limits of the waits, in seconds; None takes the defaults.
        gpus_per_process: GPUs per place; a fraction is possible.
        resources: amounts of custom resources per place.
        labels: labels that the nodes must have, such as {"ray.io/accelerator-type": "H100"}.
        detached: the places outlive the driver, until `release()`.

    Raises:
        PlacementError: a count in `process_on_nodes` is not an int of 1 or more.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool | None = None,
        name_prefix: str = "pool",
        max_colocate_count: int = 10,
        accelerator_type: str | None = None,
        cpus_per_process: float | None = None,
        nodes: Sequence[NodeSpec] = (),
        deadlines: Deadlines | None = None,
        gpus_per_process: float = 1.0,
        resources: Mapping[str, float] | None = None,
        labels: Mapping[str, str] | None = None,
        detached: bool = False,
    ) -> None:
        """Store the sizes; the first worker group on the pool reserves the places."""
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name = f"{name_prefix}-{uuid.uuid4().hex[:8]}"
        self.accelerator_type = accelerator_type
        self.cpus_per_process = cpus_per_process
        self.nodes = list(nodes)
        self.deadlines = deadlines or Deadlines()
        self.gpus_per_process = gpus_per_process
        self.resources, self.labels = dict(resources or {}), dict(labels or {})
        self.detached = detached
        self._bundles: list[Bundle] | None = None

    def bundles(self) -> list[Bundle]:
        """Wait for the places up to the deadline, and return one per rank, in rank order."""
        if self._bundles is None:
            self._bundles = self._reserve()
        return self._bundles

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the pool's placement groups, in rank order."""
        return list(dict.fromkeys(bundle.group for bundle in self.bundles()))

    def release(self) -> None:
        """Return the places to the cluster, after the groups on them have ended.

        The next group reserves new places.
        """
        if self._bundles is not None and ray.is_initialized():
            groups = self.get_placement_groups()
            subject = f"releasing the placement groups of {self.name}"
            within(RELEASE_S, partial(_remove, groups), subject)
        self._bundles = None

    def _reserve(self) -> list[Bundle]:
        """Reserve a placement group per entry of the pool, and return a bundle per process."""
        connect(deadlines=self.deadlines)
        need = self._need()
        targets = _targets(self, need)

        groups = [
            placement_group(
                [dict(need)] * count,
                strategy="STRICT_PACK",
                name=f"{self.name}-{entry}",
                lifetime="detached" if self.detached else None,
                _soft_target_node_id=target,
                bundle_label_selector=[self.labels] * count if self.labels else None,
            )
            for entry, (count, target) in enumerate(zip(self.store, targets, strict=True))
        ]

        try:
            self._await(groups, need)
        except BaseException:
            _remove(groups)
            raise

        cpus, gpus = self._part(need.get("CPU", 0.0)), self._part(need.get("GPU", 0.0))
        resources = {name: self._part(amount) for name, amount in self.resources.items()}
        return [
            Bundle(group, i, cpus, gpus, resources)
            for group, count in zip(groups, self.store, strict=True)
            for i in range(count)
        ]

    def _part(self, amount: float) -> float:
        """Return the amount for one of the groups that may share the pool.

        It is rounded down to ten-thousandths, Ray's smallest unit.
        """
        return math.floor(amount / self.max_colocate_count * 1e4) / 1e4

    def _need(self) -> dict[str, float]:
        """Return the resources of one process."""
        have = ray.cluster_resources()
        if self.use_gpu is None:
            self.use_gpu = have.get("GPU", 0) > 0
        if self.cpus_per_process is None:
            self.cpus_per_process = cpu_share(have.get("CPU", 1.0), self.world_size)
        need = {"CPU": self.cpus_per_process}
        if self.use_gpu:
            need["GPU"] = self.gpus_per_process
        if self.accelerator_type:
            need[self.accelerator_type] = 1e-4
        return need | self.resources

    def _await(self, groups: Sequence[PlacementGroup], need: dict[str, float]) -> None:
        """Wait until the placement groups are ready; raise after `placement_s` seconds."""
        warn_s = min(self.deadlines.warn_s, PENDING_S)
        clock = WaitClock(f"placement of pool {self.name}", self.deadlines.placement_s, warn_s)
        request = f"{self.store} processes of {amounts(need)} each"
        if self.labels:
            request += f" on nodes with {', '.join(map('='.join, self.labels.items()))}"
        shortage = partial(describe_shortage, need, self.world_size)
        waiting = [group.ready() for group in groups]
        while waiting:
            waiting = ray.wait(waiting, num_returns=len(waiting), timeout=clock.remaining())[1]
            if waiting and clock.is_over():
                raise WaitTimeoutError(
                    f"{clock.summary}: the cluster did not provide {request} within "
                    f"{clock.limit_s:.0f} s (timeouts.placement_s); {shortage()}. Stop the "
                    "programs that hold the resources, make the pool smaller, or, if CPUs are "
                    "short, lower cpus_per_process."
                )
            if waiting:
                clock.warn_if_old(lambda: f"{request}; {shortage()}")


def _remove(groups: Sequence[PlacementGroup]) -> None:
    for group in groups:
        remove_placement_group(group)


class SubRayResourcePool(RayResourcePool):
    """Some places of other pools, for `split_resource_pool` and `merge_resource_pool`."""

    def __init__(self, pool_ranks: Sequence[tuple[RayResourcePool, range]]) -> None:
        """Take these ranks of each pool."""
        per_node: list[int] = []
        for pool, ranks in pool_ranks:
            nodes = pool.node_list()
            for node in range(len(pool.store)):
                count = sum(nodes[rank] == node for rank in ranks)
                if count:
                    per_node.append(count)

        first = pool_ranks[0][0]
        super().__init__(
            per_node,
            first.use_gpu,
            "sub",
            first.max_colocate_count,
            cpus_per_process=first.cpus_per_process,
            deadlines=first.deadlines,
            detached=all(pool.detached for pool, _ in pool_ranks),
        )
        self.pool_ranks = list(pool_ranks)

    def release(self) -> None:
        """Do nothing: the places belong to the source pools."""

    def _reserve(self) -> list[Bundle]:
        taken = [pool.bundles()[rank] for pool, ranks in self.pool_ranks for rank in ranks]
        self.use_gpu = self.pool_ranks[0][0].use_gpu
        return taken


def split_resource_pool(
    resource_pool: RayResourcePool, split_size: int | Sequence[int]
) -> list[SubRayResourcePool]:
    """Split a pool into pools of `split_size` ranks.

    Args:
        resource_pool: the pool.
        split_size: ranks of each part, or a list with the ranks of every part.
    """
    total = resource_pool.world_size
    if isinstance(split_size, int):
        sizes = [split_size] * (total // max(split_size, 1))
    else:
        sizes = list(split_size)
    if sum(sizes) != total or any(size < 1 for size in sizes):
        raise PlacementError(
            f"a pool of {total} processes cannot be split into pools of {split_size} processes. "
            f"Use sizes of 1 or more whose sum is {total}."
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        SubRayResourcePool([(resource_pool, range(start, start + size))])
        for start, size in zip(starts, sizes, strict=True)
    ]


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> SubRayResourcePool:
    """Return one pool with the places of the first pool, then those of the second."""
    if (
        first.cpus_per_process != second.cpus_per_process
        or first.max_colocate_count != second.max_colocate_count
    ):
        raise PlacementError(
            "pools can be merged only if their cpus_per_process and max_colocate_count are equal."
        )
    return SubRayResourcePool([(pool, range(pool.world_size)) for pool in (first, second)])


class ResourcePoolManager(PoolManager):
    """verl's `ResourcePoolManager`, for pools on a Ray cluster."""

    pool_cls = RayResourcePool


def _targets(pool: RayResourcePool, need: dict[str, float]) -> list[str | None]:
    """Return the node of each entry of the pool: the configured one, or separate ones if possible.

    None lets Ray choose. Raise if an entry is larger than any node, because no wait would help.
    """
    if pool.nodes:
        return [node.key or None for node in pool.nodes]

    nodes = [node for node in living_nodes() if pool.labels.items() <= node["Labels"].items()]
    room = sum(_num_processes(node["Resources"], need) for node in nodes)
    if room < pool.world_size:
        raise PlacementError(
            f"pool {pool.name} needs {pool.world_size} processes ({amounts(need)} each), but the "
            f"cluster has room for {room} in total. Nodes: {_describe_nodes(nodes, need)}. Make "
            "the pool smaller, or, if CPUs are short, lower cpus_per_process."
        )

    chosen: dict[int, str] = {}
    largest_first = sorted(enumerate(pool.store), key=lambda entry: -entry[1])
    for entry, count in largest_first:
        fitting = [node for node in nodes if _num_processes(node["Resources"], need) >= count]
        if not fitting:
            request = {kind: amount * count for kind, amount in need.items()}
            raise PlacementError(
                f"pool {pool.name} needs {count} processes on one node ({amounts(request)}), but "
                "no node has these resources, even when idle. Nodes: "
                f"{_describe_nodes(nodes, need)}. Put fewer processes on a node, or, if CPUs are "
                "short, lower cpus_per_process."
            )
        unused = [node for node in fitting if node["NodeID"] not in chosen.values()]
        if unused:
            smallest = min(unused, key=lambda node: node["Resources"].get("CPU", 0))
            chosen[entry] = smallest["NodeID"]

    if len(chosen) < len(pool.store):
        return [None] * len(pool.store)
    return [chosen[entry] for entry in range(len(pool.store))]


def _num_processes(resources: Mapping[str, float], need: Mapping[str, float]) -> int:
    """Return the number of processes for which a node's resources are enough, up to rounding."""
    return int(min(resources.get(kind, 0) / amount + ROUNDING for kind, amount in need.items()))


def _describe_nodes(nodes: Sequence[Mapping[str, Any]], kinds: Iterable[str]) -> str:
    """Describe how much every node has of these kinds of resource."""
    kinds = list(kinds)
    words = []
    for node in nodes:
        amounts_of_node = {kind: node["Resources"].get(kind, 0) for kind in kinds}
        words.append(f"{node['NodeManagerAddress']}: {amounts(amounts_of_node)}")
    return "; ".join(words)
