"""Pools that join a run in progress."""

from __future__ import annotations

from pathlib import Path

from trainer.config.schema import RunConfig
from trainer.groups.nodes import living_nodes, needs_of_pools, require_shared_folder
from verl_like.files import write_whole
from verl_like.placement.plan import Placement, PoolPlan
from verl_like.placement.roles import expand_roles

RAY_ADDRESS = "ray_address.txt"
"""The file of the run folder with the address at which other nodes join its cluster."""


def note_address(folder: Path) -> None:
    """Write the address of the Ray cluster to the run folder, for `verl-like join`."""
    from verl_like.backends.ray.cluster import address_of_head

    write_whole(folder / RAY_ADDRESS, address_of_head())


def with_pool(config: RunConfig, placement: Placement, pool: str) -> Placement:
    """Return the plan with a further pool, on living nodes with room."""
    nodes, need = living_nodes(config), needs_of_pools(config)[pool]
    cpus = need.cpus or min(plan.cpus_per_process for plan in placement.pools.values())
    gpus = max((need.devices_on(node) for node in nodes if node.kind == "GPU"), default=0.0)
    roles = [r for r, its_pool in expand_roles(config.role_mapping).items() if its_pool == pool]
    sizes = tuple(config.resource_pool_spec[pool])
    absent = PoolPlan(pool, sizes, (), tuple(roles), cpus, gpus, need.resources, need.labels)
    placement = Placement({**placement.pools, pool: absent}).moved(pool, nodes)
    require_shared_folder(config, placement)
    return placement
