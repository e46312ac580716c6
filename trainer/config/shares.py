"""The sizes of a preset's pools: its `${share:<recipe>,<pool>,[<pools>]}`, answered.

A preset shares out the devices that the user's own pools leave, so that giving a role a pool of its
own is one pool more and no other one made smaller by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import OmegaConf

from trainer.config.recipe import Recipe
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles


def share(recipe: Recipe[Any], pool: str, preset_pools: Sequence[str], config: Any) -> list[int]:
    """Processes per node that a preset gives to `pool`: even shares, the rest to the first pools.

    Pools that no role of this run uses get nothing. Nodes are shared out when there is at least one
    for each pool, otherwise the devices of every node are. `config` is the composed tree.
    """
    inactive = recipe.inactive_roles(config)
    mapping = expand_roles(config.role_mapping)
    needed = {str(pool) for role, pool in mapping.items() if role not in inactive}
    sizes = OmegaConf.to_container(config.resource_pool_spec, resolve=False)
    assert isinstance(sizes, dict), "resource_pool_spec is a section"
    own = {str(p): size for p, size in sizes.items() if p in needed and isinstance(size, list)}
    pools = [p for p in preset_pools if p in needed and p not in own]
    if pool not in pools:
        return []

    free = [devices for devices in _left_on_nodes(config, own) if devices > 0]
    num_pools, number = len(pools), pools.index(pool)
    if len(free) >= num_pools:
        part = len(free) // num_pools
        rest = len(free) % num_pools
        first = number * part + min(number, rest)
        return free[first : first + part + (number < rest)]

    shared = [devices for devices in free if devices >= num_pools]
    if not shared:
        raise _too_few(config, pools, own)
    return [n // num_pools + (number < n % num_pools) for n in shared]


def own_pools_first(sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The pools of the tree with those of the user before those that a preset gives a share."""
    shared = {pool: size for pool, size in sizes.items() if isinstance(size, str)}
    return {pool: size for pool, size in sizes.items() if pool not in shared} | shared


def _left_on_nodes(config: Any, own: Mapping[str, Sequence[int]]) -> list[int]:
    """Devices of every node that the user's own pools leave, each on the first node with room.

    The plan of several nodes places them so, too: see `own_pools_first`.
    """
    left = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
    for pool, per_node in own.items():
        taken: list[int] = []
        for count in per_node:
            need = _devices_of(config, pool, count)
            others = [node for node in range(len(left)) if node not in taken]
            node = next((node for node in others if left[node] >= need), None)
            if node is None:
                return []
            left[node] -= need
            taken.append(node)
    return left


def _devices_of(config: Any, pool: str, count: int) -> int:
    """Devices that so many processes take: none of the GPUs where they are kept off them."""
    resources = config.pool_resources.get(pool)
    if resources is None or config.trainer.device == "cpu":
        return count
    if resources.device == "cpu":
        return 0
    return math.ceil(count * (resources.gpus or 1.0))


def _too_few(config: Any, pools: Sequence[str], own: Mapping[str, Sequence[int]]) -> ConfigError:
    """The refusal of a preset with more pools than devices, and what works instead."""
    num_nodes, num_devices = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if num_nodes < 1:
        return ConfigError(f"trainer.nnodes={num_nodes}: it must be above 0.")
    taken = sum(max(_devices_of(config, pool, n) for n in own[pool]) for pool in own)
    left = max(num_devices - taken, 0)
    given = "".join(f" resource_pool_spec.{pool}={list(own[pool])} comes first." for pool in own)
    instead = ", or placement=colocate, where roles share processes" if left else ""
    return ConfigError(
        f"The placement needs {len(pools)} pools ({', '.join(pools)}), but "
        f"trainer.nnodes={num_nodes} x trainer.n_gpus_per_node={num_devices} leaves no device for "
        f"{pools[min(left, len(pools) - 1)]!r}.{given} Set "
        f"trainer.n_gpus_per_node={taken + len(pools)} or more (on a CPU machine devices are "
        f"process slots){instead}."
    )
