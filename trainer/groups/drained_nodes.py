"""Pools on nodes that Ray drains (`ray drain-node`), and whether they can move."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.config.schema import RunConfig
from trainer.groups.nodes import without_lost_nodes
from verl_like.errors import InsufficientResourcesError, PlacementError
from verl_like.placement.plan import Placement


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
