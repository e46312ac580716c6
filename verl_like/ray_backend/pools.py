"""Pools on a Ray cluster: one placement group per node, with a bounded wait, under names that no other run has."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from verl_like.errors import PlacementError, WaitTimeoutError
from verl_like.ray_backend.cluster import amounts, connect, free_resources
from verl_like.resources import Node, ResourcePool
from verl_like.watch import Deadlines, Patience


@dataclass(frozen=True)
class Bundle:
    """A place for one process: a bundle of a placement group."""

    group: PlacementGroup
    index: int
    local_rank: int
    cpus: float
    gpus: float


class RayResourcePool(ResourcePool):
    """A pool on a Ray cluster. Its placement groups are made when the first worker group needs them."""

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool | None = None,
        name_prefix: str = "pool",
        max_colocate_count: int = 1,
        cpus_per_process: float | None = None,
        nodes: Sequence[Node] = (),
        deadlines: Deadlines | None = None,
    ) -> None:
        """`max_colocate_count` groups may be put on the pool side by side.

        `nodes` pins its entries. GPUs are used where there are any.
        """
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name = f"{name_prefix}-{uuid.uuid4().hex[:8]}"
        self.cpus_per_process = cpus_per_process
        self.nodes = list(nodes)
        self.deadlines = deadlines or Deadlines()
        self._bundles: list[Bundle] | None = None

    def bundles(self) -> list[Bundle]:
        """A place for every rank, in rank order.

        Waits for the cluster to have them all, up to the deadline for placement.
        """
        if self._bundles is None:
            self._bundles = self._reserve()
        return self._bundles

    def get_placement_groups(self) -> list[PlacementGroup]:
        """One placement group per node, in rank order."""
        return list(dict.fromkeys(bundle.group for bundle in self.bundles()))

    def _reserve(self) -> list[Bundle]:
        connect()
        if self.use_gpu is None:
            self.use_gpu = ray.cluster_resources().get("GPU", 0) > 0
        gpus = 1.0 if self.use_gpu else 0.0
        if self.cpus_per_process is None:
            self.cpus_per_process = min(1.0, ray.cluster_resources().get("CPU", 1.0) / self.world_size)
        need = {"CPU": self.cpus_per_process, **({"GPU": gpus} if gpus else {})}
        _refuse_impossible(self, need)
        groups = []
        for entry, count in enumerate(self.store):
            pinned = {"_soft_target_node_id": self.nodes[entry].key} if self.nodes and self.nodes[entry].key else {}
            groups.append(
                placement_group([dict(need)] * count, strategy="STRICT_PACK", name=f"{self.name}-{entry}", **pinned)
            )
        patience = Patience(f"placement of pool {self.name}", self.deadlines.placement_s, self.deadlines.warn_s)
        waiting = [group.ready() for group in groups]
        while waiting:
            waiting = ray.wait(waiting, num_returns=len(waiting), timeout=patience.remaining())[1]
            if waiting and patience.over():
                for group in groups:
                    remove_placement_group(group)
                raise WaitTimeoutError(
                    f"{patience.what}: the cluster did not give {self.store} processes of {need} within "
                    f"{patience.limit_s:.0f} s. "
                    f"Free now: {free_resources()}. Lower cpus_per_process or the pool's size, or stop what holds "
                    "them."
                )
            patience.warn_if_old(f"{self.store} processes of {need}; free now: {free_resources()}")
        places = zip(groups, self.store, strict=True)
        share = self.max_colocate_count
        return [
            Bundle(g, i, i, self.cpus_per_process / share, gpus / share) for g, count in places for i in range(count)
        ]


class SubRayResourcePool(RayResourcePool):
    """Some of the places of another pool, or of several: made by `split_resource_pool` and `merge_resource_pool`."""

    def __init__(self, sources: Sequence[tuple[RayResourcePool, range]]) -> None:
        """Each source is a pool and the ranks taken from it."""
        per_node: list[int] = []
        for pool, ranks in sources:
            nodes = pool.node_list()
            per_node += [n for node in range(len(pool.store)) if (n := sum(nodes[rank] == node for rank in ranks))]
        first = sources[0][0]
        super().__init__(
            per_node, first.use_gpu, "sub", first.max_colocate_count, first.cpus_per_process, deadlines=first.deadlines
        )
        self.sources = list(sources)

    def _reserve(self) -> list[Bundle]:
        taken = [pool.bundles()[rank] for pool, ranks in self.sources for rank in ranks]
        return [replace(bundle, local_rank=local) for bundle, local in zip(taken, self.local_rank_list(), strict=True)]


def split_resource_pool(resource_pool: RayResourcePool, split_size: int | Sequence[int]) -> list[SubRayResourcePool]:
    """Cut a pool into parts of `split_size` ranks each (an int), or of these sizes (a list that sums to the pool's "
    "size)."""
    total = resource_pool.world_size
    sizes = [split_size] * (total // max(split_size, 1)) if isinstance(split_size, int) else list(split_size)
    if sum(sizes) != total or any(size < 1 for size in sizes):
        raise PlacementError(
            f"a pool of {total} processes cannot be split into parts of {split_size}: the parts must be 1 or more and "
            f"sum to {total}."
        )
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [
        SubRayResourcePool([(resource_pool, range(start, start + size))])
        for start, size in zip(starts, sizes, strict=True)
    ]


def merge_resource_pool(first: RayResourcePool, second: RayResourcePool) -> SubRayResourcePool:
    """One pool with the places of both, those of the first before those of the second."""
    if first.cpus_per_process != second.cpus_per_process or first.max_colocate_count != second.max_colocate_count:
        raise PlacementError("pools can be merged only if their cpus_per_process and max_colocate_count agree.")
    return SubRayResourcePool([(pool, range(pool.world_size)) for pool in (first, second)])


def _refuse_impossible(pool: RayResourcePool, need: dict[str, float]) -> None:
    """No node is large enough: no wait can mend that."""
    nodes = [node for node in ray.nodes() if node["Alive"]]
    for count in pool.store:
        if not any(all(node["Resources"].get(k, 0) + 1e-9 >= v * count for k, v in need.items()) for node in nodes):
            have = "; ".join(
                f"{n['NodeManagerAddress']}: {amounts({k: n['Resources'].get(k, 0) for k in need})}" for n in nodes
            )
            wanted = amounts({k: v * count for k, v in need.items()})
            raise PlacementError(
                f"pool {pool.name} wants {count} processes on one node ({wanted}), and no node has that in all. Nodes: "
                f"{have}. "
                "Lower cpus_per_process or the pool's size."
            )
