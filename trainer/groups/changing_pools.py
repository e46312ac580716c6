"""Pools that leave nodes or join while the run goes on.

A pool leaves nodes that are gone or that Ray drains, and moves to others. A pool without which the
run may begin, or go on, joins once a node has room.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig
from trainer.groups.cluster import living_nodes
from trainer.groups.nodes import needs_of_pools, plan_on, require_shared_folder
from verl_like.errors import InsufficientResourcesError, PlacementError
from verl_like.files import write_whole
from verl_like.placement.plan import Placement, PoolPlan
from verl_like.placement.pools import expand_roles

RAY_ADDRESS = "ray_address.txt"
"""The file of the run folder with the address at which other nodes join its cluster."""
logger = logging.getLogger(__name__)


def pools_to_move(config: RunConfig, placement: Placement) -> dict[str, float]:
    """Return pool -> seconds until it loses a node that Ray drains."""
    if config.trainer.backend != "ray":
        return {}
    from verl_like.backends.ray.cluster import draining_nodes

    left_s = draining_nodes()
    seconds = {
        pool: [left_s[node.key] for node in plan.nodes if node.key in left_s]
        for pool, plan in placement.pools.items()
    }
    return {pool: min(of_nodes) for pool, of_nodes in seconds.items() if of_nodes}


def can_move(config: RunConfig, placement: Placement, pools: Iterable[str]) -> bool:
    """Return whether other nodes have room for these pools, which lose nodes."""
    try:
        for pool in pools:
            placement = without_lost_nodes(config, placement, pool)
    except InsufficientResourcesError:
        return False
    except PlacementError:  # all pools together fit in another way
        return True
    return True


def without_lost_nodes(config: RunConfig, placement: Placement, pool: str) -> Placement:
    """Return the plan with this pool on living nodes, or the same plan if it has lost none.

    Raise InsufficientResourcesError if another node would help, and PlacementError if the pools
    would fit when planned again from scratch.
    """
    if config.trainer.backend != "ray":
        return placement
    from verl_like.backends.ray.cluster import node_failure_cause

    if not any(node_failure_cause(node.key) for node in placement.pools[pool].nodes):
        return placement
    nodes = living_nodes(config)
    try:
        moved = placement.moved(pool, nodes)
    except InsufficientResourcesError as error:
        try:
            plan_on(config, nodes)
        except PlacementError:
            raise error from None
        raise PlacementError(f"{error} A new placement of all pools would fit.") from None
    require_shared_folder(config, moved)
    return moved


def leave_lost_nodes(groups: Any, pool: str) -> bool:
    """Plan a pool of the `WorkerGroups` that lost a node on others; return whether it moved."""
    with groups.planning:  # so that another pool that moves sees these new nodes
        before = groups.placement
        groups.placement = without_lost_nodes(groups.config, before, pool)
    if groups.placement.pools[pool] == before.pools[pool]:
        return False
    nodes = ", ".join(f"{n.name} ({n.key[:8]})" for n in groups.placement.pools[pool].nodes)
    logger.warning("pool %s lost a node and moved to %s.", pool, nodes)
    groups.note_placement()
    return True


def note_address(folder: Path) -> None:
    """Write the address of the Ray cluster to the run folder, for `verl-like join`."""
    from verl_like.backends.ray.cluster import address_of_head

    write_whole(folder / RAY_ADDRESS, address_of_head())


def with_pool(config: RunConfig, placement: Placement, pool: str) -> Placement:
    """Return the plan with a further pool, on nodes that are alive and have room."""
    nodes, need = living_nodes(config), needs_of_pools(config)[pool]
    cpus = need.cpus or min(plan.cpus_per_process for plan in placement.pools.values())
    gpus = max((need.devices_on(node) for node in nodes if node.kind == "GPU"), default=0.0)
    roles = [r for r, its_pool in expand_roles(config.role_mapping).items() if its_pool == pool]
    sizes = tuple(config.resource_pool_spec[pool])
    absent = PoolPlan(pool, sizes, (), tuple(roles), cpus, gpus, need.resources, need.labels)
    placement = Placement({**placement.pools, pool: absent}).moved(pool, nodes)
    require_shared_folder(config, placement)
    return placement
