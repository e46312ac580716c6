"""The Ray backend: one actor per process of a pool, with one instance of every role on that pool.

    connect()
    pool = RayResourcePool([2])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(Critic, config))

`cluster` joins or starts a cluster, `pools` reserves places on it, `transport` carries calls to the
actors, `group` puts these together. Nothing outside this package imports ray.
"""

from verl_like.backends.ray.cluster import cluster_nodes, connect
from verl_like.backends.ray.group import RayClassWithInitArgs, RayWorkerGroup
from verl_like.backends.ray.pools import (
    RayResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)
from verl_like.calls.group import ColocatedClasses, create_colocated_worker_cls

__all__ = [
    "ColocatedClasses",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "cluster_nodes",
    "connect",
    "create_colocated_worker_cls",
    "merge_resource_pool",
    "split_resource_pool",
]
