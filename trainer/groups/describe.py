"""The devices and the placement of a run in words, with advice, for `verl-like check` and runs."""

from __future__ import annotations

import math
from collections.abc import Mapping

from trainer.config.devices import run_devices
from trainer.config.schema import RunConfig
from trainer.groups.cluster import devices_here
from trainer.groups.nodes import joined_cluster, needs_of_pools
from verl_like.placement.plan import NEARNESS, Placement, PoolPlan
from verl_like.placement.pools import NodeSpec
from workers.parallel.sharding import dims_of
from workers.training.role_model_spec import RoleModelSpec


def describe_devices(config: RunConfig) -> str:
    """Describe the devices of this machine; raise if they do not suit the configuration."""
    trainer, joins = config.trainer, joined_cluster(config)
    if trainer.simulate is not None:
        where = f"each of {trainer.nnodes} nodes" if trainer.nnodes > 1 else "1 node"
        return (
            f"Devices: {_count_devices(config)} on {where}, simulated by --gpus "
            f"{trainer.simulate} (trainer.simulate); the software of such machines was not checked"
            f"{_note_of_idle_gpus(config)}"
        )
    if trainer.backend == "ray" and (joins or trainer.nnodes > 1):
        where = joins or "on this machine"
        return f"Devices: those of the Ray cluster {where}, which were not checked"
    return f"Devices: {_count_devices(config)} on this machine{_note_of_idle_gpus(config)}"


def _count_devices(config: RunConfig) -> str:
    count, kind = config.trainer.n_gpus_per_node, devices_here(config)
    if kind == "CPU slot":
        return f"{count} CPU slots" if count > 1 else "1 CPU slot"
    return f"{run_devices(config.trainer).num_gpus} x {kind}"


def _note_of_idle_gpus(config: RunConfig) -> str:
    """Return a further line that names the keys with which a run uses more GPUs, or ""."""
    trainer, has = config.trainer, run_devices(config.trainer)
    num_gpus = 0 if has.type == "cpu" else trainer.nnodes * (has.num_gpus or 0)
    node, needs = NodeSpec("", num_gpus, 0.0, "GPU"), needs_of_pools(config)
    pools = config.resource_pool_spec.items()
    used = math.ceil(sum(sum(sizes) * needs[pool].devices_on(node) for pool, sizes in pools))
    if used >= num_gpus:
        return ""
    way = f"raise {config.pool_keys or 'resource_pool_spec'} to use more"
    if not config.pool_keys and trainer.n_gpus_per_node != has.num_gpus:
        way = f"set trainer.n_gpus_per_node={has.num_gpus} to use all"
    return f"\nnote: this run uses {used} of {num_gpus} GPUs; {way}"


def slow_label(pool: PoolPlan) -> str:
    """Return the first label of `NEARNESS` in which the pool's nodes differ; "" if none."""
    values = {name: {(node.labels or {}).get(name) for node in pool.nodes} for name in NEARNESS}
    return next((name for name in NEARNESS if len(values[name]) > 1), "")


def propose_hsdp(placement: Placement, models: Mapping[str, RoleModelSpec]) -> list[str]:
    """Return a note for each pool that shards weights over nodes which are far from each other."""
    notes = []
    for pool in placement.pools.values():
        label = slow_label(pool)
        keys: dict[str, int] = {}
        for model in (models[role] for role in pool.roles if role in models):
            dims = dims_of(pool.world_size, model.sharding)
            inside = math.gcd(min(pool.process_on_nodes) // dims.model_size, dims.data_size)
            if 0 < inside < dims.shard:
                keys[f"{model.axes_key}.shard"] = inside
        if label and keys:
            settings = " ".join(f"{key}={size}" for key, size in keys.items())
            notes.append(
                f"note: the nodes of {pool.name} differ in {label}, and weights are "
                f"sharded over all of them. If the links between them are slow, try {settings} "
                "(HSDP): weights are then gathered within a node, which needs more memory."
            )
    return notes
