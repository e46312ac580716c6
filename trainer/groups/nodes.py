"""The nodes of a run, what its pools need of them, and the devices of this machine.

All of it is found out before the pools are planned, and anew when a pool of a run on Ray is
restarted that has lost a node.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from trainer.config.devices import devices_of
from trainer.config.schema import PoolResources, RunConfig
from trainer.config.user_modules import modules_of_the_user
from verl_like.calls.diagnose import Deadlines
from verl_like.errors import NoRoomError, PlacementError
from verl_like.placement.plan import Placement
from verl_like.placement.pools import Node, ProcessNeeds


def needs_of_pools(config: RunConfig) -> dict[str, ProcessNeeds]:
    """What a process of every pool takes: `pool_resources`, else what the run's keys say."""
    needs = {}
    for pool in config.resource_pool_spec:
        own = config.pool_resources.get(pool, PoolResources())
        device = config.trainer.device if own.device == "auto" else own.device
        needs[pool] = ProcessNeeds(device, own.cpus, own.gpus, own.resources)
    return needs


def _device_of_nodes(config: RunConfig) -> str:
    """Whether GPUs are looked for: `trainer.device`, or what any pool asks for."""
    devices = {need.device for need in needs_of_pools(config).values()} or {config.trainer.device}
    return next(device for device in ("cuda", "auto", "cpu") if device in devices)


def find_nodes(config: RunConfig, worker_code: Sequence[str]) -> list[Node]:
    """This machine, or the nodes of the Ray cluster, which is joined or started.

    `worker_code` are the dotted paths that workers import.
    """
    trainer = config.trainer
    if trainer.backend != "ray":
        kind, cpus = _devices_here(config), float(os.cpu_count() or 1)
        return [Node("this machine", trainer.n_gpus_per_node, cpus, kind, resources={})]

    _connect(config, worker_code)
    nodes = living_nodes(config)
    if _device_of_nodes(config) == "cuda" and not any(node.kind == "GPU" for node in nodes):
        raise _no_gpu(config, f"none of the {len(nodes)} node(s) of the cluster has one")
    return nodes


def living_nodes(config: RunConfig) -> list[Node]:
    """The nodes of the Ray cluster that answer: Ray itself may take half a minute to miss one."""
    from verl_like.backends.ray.cluster import cluster_nodes, why_gone

    has_gpus = _device_of_nodes(config) != "cpu"
    nodes = cluster_nodes(config.trainer.n_gpus_per_node, use_gpu=has_gpus)
    return [node for node in nodes if why_gone(node.key) is None]


def without_lost_nodes(config: RunConfig, placement: Placement, pool: str) -> Placement:
    """The plan with this pool on nodes that live; the same one where none of its own is lost.

    NoRoomError: another node would do. PlacementError: there is room if all pools are planned anew.
    """
    if config.trainer.backend != "ray":
        return placement
    from verl_like.backends.ray.cluster import why_gone

    if not any(why_gone(node.key) for node in placement.pools[pool].nodes):
        return placement
    nodes = living_nodes(config)
    try:
        moved = placement.moved(pool, nodes)
    except NoRoomError as error:
        try:
            plan_on(config, nodes)
        except PlacementError:
            raise error from None
        raise PlacementError(f"{error} Planned anew, all pools fit.") from None
    require_shared_folder(config, moved)
    return moved


def plan_on(config: RunConfig, nodes: Sequence[Node]) -> Placement:
    """The pools and roles of the configuration on these nodes."""
    spec, needs = config.resource_pool_spec, needs_of_pools(config)
    return Placement.plan(spec, config.role_mapping, nodes, config.cpus_per_process, needs)


def _connect(config: RunConfig, worker_code: Sequence[str]) -> None:
    from verl_like.backends import ray as ray_backend

    settings = config.ray
    runtime_env = dict(settings.runtime_env)
    if joined_cluster(config) and (modules := modules_of_the_user(worker_code)):
        runtime_env["py_modules"] = [*runtime_env.get("py_modules", []), *modules]
    limits = Deadlines.of(config.watch)
    ray_backend.connect(settings.address, settings.namespace, runtime_env, limits)


def joined_cluster(config: RunConfig) -> str | None:
    """The address of a cluster that others have started."""
    return config.ray.address or os.environ.get("RAY_ADDRESS")


def begin_cluster(config: RunConfig, at_end: ExitStack) -> None:
    """Let a Ray cluster of the run's own start beside what the driver still has to do.

    `find_nodes` waits for it. A start that fails is tried again there, which says why.
    """
    trainer = config.trainer
    if trainer.backend != "ray" or trainer.dry_run or joined_cluster(config):
        return

    def start() -> None:
        with suppress(Exception):
            _connect(config, ())

    thread = threading.Thread(target=start, name="cluster", daemon=True)
    thread.start()
    at_end.callback(thread.join)  # whatever happens until then, it ends in order


def require_shared_folder(config: RunConfig, placement: Placement) -> None:
    """Where there is more than one node, all of them must see the run folder."""
    by_key = {node.key: node for plan in placement.pools.values() for node in plan.nodes}
    if len(by_key) > 1:
        from verl_like.backends.ray import shared_folder

        folder = Path(config.trainer.default_local_dir)
        shared_folder.require_shared_folder(folder, by_key.values())


def devices_in_words(config: RunConfig) -> str:
    """The devices of this machine; refused if they are not what the configuration asks for."""
    trainer, joins = config.trainer, joined_cluster(config)
    if trainer.pretend is not None:
        kind = _devices_here(config)
        return (
            f"devices: {trainer.n_gpus_per_node} of kind {kind} on {trainer.nnodes} machine(s), as "
            f"trainer.pretend={trainer.pretend} says; what is installed there was not looked at"
        )
    if trainer.backend == "ray" and (joins or trainer.nnodes > 1):
        return f"devices: those of the Ray cluster {joins or 'here'}, not looked at"
    return f"devices: {trainer.n_gpus_per_node} of kind {_devices_here(config)} on this machine"


def _devices_here(config: RunConfig) -> str:
    wanted, has = config.trainer.n_gpus_per_node, devices_of(config.trainer)
    device = _device_of_nodes(config)
    if device == "cuda" and has.num_gpus is None:
        import torch

        raise _no_gpu(config, f"torch {torch.__version__} sees none on this machine")
    if device == "cpu" or has.num_gpus is None:
        return "CPU slot"
    if wanted > has.num_gpus:
        pretend = config.trainer.pretend
        whose = "this machine has" if pretend is None else f"trainer.pretend={pretend} has"
        raise PlacementError(
            f"trainer.n_gpus_per_node={wanted} GPUs, and {whose} {has.num_gpus}. Set it to "
            f"{has.num_gpus}, or trainer.device=cpu for process slots on CPUs."
        )
    return has.card or "GPU"


def _no_gpu(config: RunConfig, why: str) -> PlacementError:
    """The refusal of `device=cuda`, by the key that says so."""
    pools = [pool for pool, own in config.pool_resources.items() if own.device == "cuda"]
    in_all = config.trainer.device == "cuda"
    asks = "trainer.device" if in_all else f"pool_resources.{pools[0]}.device"
    return PlacementError(
        f"{asks}=cuda asks for GPUs, but {why}. Set {asks}=auto or cpu to run on CPU slots."
    )
