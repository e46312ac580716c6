"""Advice for pools whose nodes are far from each other."""

from __future__ import annotations

import math
from collections.abc import Mapping

from verl_like.placement.plan import NEARNESS, Placement, PoolPlan
from workers.parallel.sharding import dims_of
from workers.training.role_model import RoleModelSpec


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
