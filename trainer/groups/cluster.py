"""The nodes of a run: this machine, or a Ray cluster, whose nodes pools leave and join.

A run starts or joins a cluster. Nodes are read before the pools are planned. On Ray, they are read
again when a pool that has lost a node is restarted.

A pool leaves nodes that are gone or that Ray drains, and moves to others. A pool without which the
run may begin, or go on, joins once a node has room.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from trainer.config.devices import run_devices
from trainer.config.schema import RunConfig
from trainer.config.user_modules import modules_of_the_user
from trainer.groups.nodes import (
    device_of_nodes,
    joined_cluster,
    needs_of_pools,
    plan_on,
    require_shared_folder,
)
from verl_like.calls.deadlines import Deadlines, in_daemon
from verl_like.errors import InsufficientResourcesError, PlacementError
from verl_like.files import write_atomic
from verl_like.placement.plan import Placement, PoolPlan
from verl_like.placement.pools import NodeSpec, expand_roles

logger = logging.getLogger(__name__)


def find_nodes(config: RunConfig, worker_code: Sequence[str]) -> list[NodeSpec]:
    """Return this machine, or the nodes of the Ray cluster, which is joined or started.

    `worker_code` has the names and paths of code that workers use.
    """
    trainer = config.trainer
    if trainer.backend != "ray":
        kind, cpus = devices_here(config), float(os.cpu_count() or 1)
        return [NodeSpec("this machine", trainer.n_gpus_per_node, cpus, kind, resources={})]

    _connect(config, worker_code)
    nodes = living_nodes(config)
    if device_of_nodes(config) == "cuda" and not any(node.kind == "GPU" for node in nodes):
        raise error_without_gpu(config, f"none of the {len(nodes)} node(s) of the cluster has one")
    return nodes


def devices_here(config: RunConfig) -> str:
    """Return the kind of this machine's devices; raise if it has too few."""
    num_gpus, has = config.trainer.n_gpus_per_node, run_devices(config.trainer)
    device = device_of_nodes(config)
    if device == "cuda" and has.num_gpus is None:
        import torch

        raise error_without_gpu(config, f"torch {torch.__version__} sees none on this machine")
    if device == "cpu" or has.num_gpus is None:
        return "CPU slot"
    if num_gpus > has.num_gpus:
        simulated = config.trainer.simulate
        whose = "this machine has"
        if simulated is not None:
            whose = f"--gpus {simulated} (trainer.simulate) has"
        raise PlacementError(
            f"trainer.n_gpus_per_node={num_gpus}, but {whose} {has.num_gpus}. Set it to "
            f"{has.num_gpus}, or trainer.device=cpu for process slots on CPUs."
        )
    return has.gpu or "GPU"


def error_without_gpu(config: RunConfig, why: str) -> PlacementError:
    """Return the error for `device=cuda` without GPUs, which names the key."""
    pools = [
        pool for pool, resources in config.pool_resources.items() if resources.device == "cuda"
    ]
    in_all = config.trainer.device == "cuda"
    asks = "trainer.device" if in_all else f"pool_resources.{pools[0]}.device"
    return PlacementError(
        f"{asks}=cuda asks for GPUs, but {why}. Set {asks}=auto or cpu to run on CPU slots."
    )


def living_nodes(config: RunConfig) -> list[NodeSpec]:
    """Return the nodes of the Ray cluster that answer; Ray notices a dead node only after 30 s."""
    from verl_like.backends.ray.cluster import cluster_nodes, node_failure_cause

    has_gpus = device_of_nodes(config) != "cpu"
    nodes = cluster_nodes(config.trainer.n_gpus_per_node, use_gpu=has_gpus)
    return [node for node in nodes if node_failure_cause(node.key) is None]


def begin_cluster(config: RunConfig, at_end: ExitStack) -> None:
    """Start the run's own Ray cluster in a thread while the driver prepares the run.

    `find_nodes` waits for it. If the start fails, `find_nodes` tries again and reports the error.
    """
    trainer = config.trainer
    if trainer.backend != "ray" or trainer.dry_run or joined_cluster(config):
        return

    starting = in_daemon("cluster", _connect, config, ())
    at_end.callback(starting.exception)  # waits for the start even after an error


def _connect(config: RunConfig, worker_code: Sequence[str]) -> None:
    from verl_like.backends import ray as ray_backend

    settings = config.ray
    runtime_env = dict(settings.runtime_env)
    modules = modules_of_the_user(worker_code) if joined_cluster(config) else []
    if modules:
        runtime_env["py_modules"] = [*runtime_env.get("py_modules", []), *modules]
    limits, gib = Deadlines.from_settings(config.timeouts), settings.object_store_gib
    options = {} if gib is None else {"object_store_memory": int(gib * 2**30)}
    ray_backend.connect(settings.address, settings.namespace, runtime_env, limits, **options)


RAY_ADDRESS = "ray_address.txt"
"""The file of the run folder with the address at which other nodes join its cluster."""


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

    write_atomic(folder / RAY_ADDRESS, address_of_head())


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
