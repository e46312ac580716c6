"""The plan of a run on Ray that has lost a node: who goes where instead.

Which nodes live is found out when a run starts; the plan is made anew when a pool is restarted.
"""

from __future__ import annotations

from trainer.config.schema import RunConfig
from trainer.groups.nodes import nodes_of_cluster, plan_on, require_shared_folder
from verl_like.errors import NoRoomError, PlacementError
from verl_like.placement.plan import Placement
from verl_like.placement.pools import Node


def living_nodes(config: RunConfig) -> list[Node]:
    """Those of the cluster that answer: Ray itself may take half a minute to miss one."""
    from verl_like.backends.ray.probes import why_gone

    return [node for node in nodes_of_cluster(config) if why_gone(node.key) is None]


def without_lost_nodes(config: RunConfig, placement: Placement, pool: str) -> Placement:
    """The plan with this pool on nodes that live; the same one where none of its own is lost.

    NoRoomError: another node would do. PlacementError: there is room if all pools are planned anew.
    """
    if config.trainer.backend != "ray":
        return placement
    from verl_like.backends.ray.probes import why_gone

    if not any(why_gone(node.key) for node in placement.pools[pool].nodes):
        return placement
    nodes = living_nodes(config)
    try:
        moved = placement.moved(pool, nodes)
    except NoRoomError as error:
        if _have_room_for_all(config, nodes):
            raise PlacementError(f"{error} Planned anew, all pools fit.") from None
        raise
    require_shared_folder(config, (node for plan in moved.pools.values() for node in plan.nodes))
    return moved


def _have_room_for_all(config: RunConfig, nodes: list[Node]) -> bool:
    try:
        plan_on(config, nodes)
    except PlacementError:
        return False
    return True
