"""The nodes of a run, the needs of its pools, and the devices of this machine.

They are read before the pools are planned. On Ray, they are read again when a pool that has lost a
node is restarted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from trainer.config.devices import devices_of
from trainer.config.schema import PoolResources, RunConfig
from trainer.config.user_modules import modules_of_the_user
from verl_like.calls.diagnose import Deadlines
from verl_like.errors import PlacementError
from verl_like.placement.plan import Placement
from verl_like.placement.pools import NodeSpec, ProcessNeeds
from verl_like.threads import in_daemon


def needs_of_pools(config: RunConfig) -> dict[str, ProcessNeeds]:
    """Return the resources per process of every pool, by `pool_resources` or the run's keys."""
    needs = {}
    for pool in config.resource_pool_spec:
        section = config.pool_resources.get(pool, PoolResources())
        device = config.trainer.device if section.device == "auto" else section.device
        resources, labels = section.resources, section.labels
        needs[pool] = ProcessNeeds(device, section.cpus, section.gpus, resources, labels)
    return needs


def _device_of_nodes(config: RunConfig) -> str:
    """Return the device type to look for on nodes: cuda if a pool needs it, else auto, else cpu."""
    devices = {need.device for need in needs_of_pools(config).values()} or {config.trainer.device}
    return next(device for device in ("cuda", "auto", "cpu") if device in devices)


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
    if _device_of_nodes(config) == "cuda" and not any(node.kind == "GPU" for node in nodes):
        from trainer.groups.no_gpu import error_without_gpu

        raise error_without_gpu(config, f"none of the {len(nodes)} node(s) of the cluster has one")
    return nodes


def living_nodes(config: RunConfig) -> list[NodeSpec]:
    """Return the nodes of the Ray cluster that answer; Ray notices a dead node only after 30 s."""
    from verl_like.backends.ray.cluster import cluster_nodes, node_failure_cause

    has_gpus = _device_of_nodes(config) != "cpu"
    nodes = cluster_nodes(config.trainer.n_gpus_per_node, use_gpu=has_gpus)
    return [node for node in nodes if node_failure_cause(node.key) is None]


def plan_on(config: RunConfig, nodes: Sequence[NodeSpec]) -> Placement:
    """Return the plan of the configuration's pools and roles on these nodes."""
    if config.optional_pools:
        from trainer.groups.optional_pools import without_absent_pools

        config = without_absent_pools(config, lambda fewer: plan_of_all(fewer, nodes))
    return plan_of_all(config, nodes)


def plan_of_all(config: RunConfig, nodes: Sequence[NodeSpec]) -> Placement:
    """Return the plan; raise if the nodes lack room for a pool."""
    spec, needs = config.resource_pool_spec, needs_of_pools(config)
    return Placement.plan(spec, config.role_mapping, nodes, config.cpus_per_process, needs)


def _connect(config: RunConfig, worker_code: Sequence[str]) -> None:
    from verl_like.backends import ray as ray_backend

    settings = config.ray
    runtime_env = dict(settings.runtime_env)
    if joined_cluster(config) and (modules := modules_of_the_user(worker_code)):
        runtime_env["py_modules"] = [*runtime_env.get("py_modules", []), *modules]
    limits, gib = Deadlines.of(config.timeouts), settings.object_store_gib
    options = {} if gib is None else {"object_store_memory": int(gib * 2**30)}
    ray_backend.connect(settings.address, settings.namespace, runtime_env, limits, **options)


def joined_cluster(config: RunConfig) -> str | None:
    """Return the address of an existing cluster to join, or None."""
    return config.ray.address or os.environ.get("RAY_ADDRESS")


def begin_cluster(config: RunConfig, at_end: ExitStack) -> None:
    """Start the run's own Ray cluster in a thread while the driver prepares the run.

    `find_nodes` waits for it. If the start fails, `find_nodes` tries again and reports the error.
    """
    trainer = config.trainer
    if trainer.backend != "ray" or trainer.dry_run or joined_cluster(config):
        return

    starting = in_daemon("cluster", _connect, config, ())
    at_end.callback(starting.exception)  # waits for the start even after an error


def require_shared_folder(config: RunConfig, placement: Placement) -> None:
    """Check that all nodes see the run folder, if the plan has more than one node."""
    by_key = {node.key: node for plan in placement.pools.values() for node in plan.nodes}
    if len(by_key) > 1:
        from verl_like.backends.ray import cluster

        folder = Path(config.trainer.default_local_dir)
        cluster.require_shared_folder(folder, by_key.values())


def devices_here(config: RunConfig) -> str:
    """Return the kind of this machine's devices; raise if it has too few."""
    wanted, has = config.trainer.n_gpus_per_node, devices_of(config.trainer)
    device = _device_of_nodes(config)
    if device == "cuda" and has.num_gpus is None:
        import torch

        from trainer.groups.no_gpu import error_without_gpu

        raise error_without_gpu(config, f"torch {torch.__version__} sees none on this machine")
    if device == "cpu" or has.num_gpus is None:
        return "CPU slot"
    if wanted > has.num_gpus:
        simulated = config.trainer.simulate
        whose = (
            "this machine has"
            if simulated is None
            else f"--gpus {simulated} (trainer.simulate) has"
        )
        raise PlacementError(
            f"trainer.n_gpus_per_node={wanted}, but {whose} {has.num_gpus}. Set it to "
            f"{has.num_gpus}, or trainer.device=cpu for process slots on CPUs."
        )
    return has.gpu or "GPU"
