"""The needs of a run's pools, and their plan on nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from trainer.config.schema import PoolResources, RunConfig
from verl_like.errors import InsufficientResourcesError
from verl_like.placement.plan import Placement
from verl_like.placement.pools import NodeSpec, ProcessNeeds


def needs_of_pools(config: RunConfig) -> dict[str, ProcessNeeds]:
    """Return the resources per process of every pool, by `pool_resources` or the run's keys."""
    needs = {}
    for pool in config.resource_pool_spec:
        section = config.pool_resources.get(pool, PoolResources())
        device = config.trainer.device if section.device == "auto" else section.device
        resources, labels = section.resources, section.labels
        needs[pool] = ProcessNeeds(device, section.cpus, section.gpus, resources, labels)
    return needs


def device_of_nodes(config: RunConfig) -> str:
    """Return the device type to look for on nodes: cuda if a pool needs it, else auto, else cpu."""
    devices = {need.device for need in needs_of_pools(config).values()} or {config.trainer.device}
    return next(device for device in ("cuda", "auto", "cpu") if device in devices)


def plan_on(config: RunConfig, nodes: Sequence[NodeSpec]) -> Placement:
    """Return the plan of the pools and roles, without the last optional pools that find no room.

    Raise if the nodes lack room for the others.
    """
    needs, spec, mapping = needs_of_pools(config), config.resource_pool_spec, config.role_mapping
    for pool in reversed(config.optional_pools):
        with suppress(InsufficientResourcesError):
            return Placement.plan(spec, mapping, nodes, config.cpus_per_process, needs)
        spec = {name: sizes for name, sizes in spec.items() if name != pool}
        mapping = {role: its_pool for role, its_pool in mapping.items() if its_pool != pool}
    return Placement.plan(spec, mapping, nodes, config.cpus_per_process, needs)


def joined_cluster(config: RunConfig) -> str | None:
    """Return the address of an existing cluster to join, or None."""
    return config.ray.address or os.environ.get("RAY_ADDRESS")


def require_shared_folder(config: RunConfig, placement: Placement) -> None:
    """Check that all nodes see the run folder, if the plan has more than one node."""
    by_key = {node.key: node for plan in placement.pools.values() for node in plan.nodes}
    if len(by_key) > 1:
        from verl_like.backends.ray import cluster

        folder = Path(config.trainer.default_local_dir)
        cluster.require_shared_folder(folder, by_key.values())
