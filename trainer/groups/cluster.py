"""The nodes of a run: this machine with its devices, or a Ray cluster that it starts or joins.

They are read before the pools are planned. On Ray, they are read again when a pool that has lost a
node is restarted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack

from trainer.config.devices import run_devices
from trainer.config.schema import RunConfig
from trainer.config.user_modules import modules_of_the_user
from trainer.groups.nodes import device_of_nodes, joined_cluster
from verl_like.calls.deadlines import Deadlines
from verl_like.errors import PlacementError
from verl_like.placement.pools import NodeSpec
from verl_like.threads import in_daemon


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
    wanted, has = config.trainer.n_gpus_per_node, run_devices(config.trainer)
    device = device_of_nodes(config)
    if device == "cuda" and has.num_gpus is None:
        import torch

        raise error_without_gpu(config, f"torch {torch.__version__} sees none on this machine")
    if device == "cpu" or has.num_gpus is None:
        return "CPU slot"
    if wanted > has.num_gpus:
        simulated = config.trainer.simulate
        whose = "this machine has"
        if simulated is not None:
            whose = f"--gpus {simulated} (trainer.simulate) has"
        raise PlacementError(
            f"trainer.n_gpus_per_node={wanted}, but {whose} {has.num_gpus}. Set it to "
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
    limits, gib = Deadlines.of(config.timeouts), settings.object_store_gib
    options = {} if gib is None else {"object_store_memory": int(gib * 2**30)}
    ray_backend.connect(settings.address, settings.namespace, runtime_env, limits, **options)
