"""One driver, groups of workers on named pools, a `DataProto` split and collected per call.

Everything here is imported lazily, so `import verl_like` is quick and pulls neither ray nor transformers. Names that
need Ray (`RayWorkerGroup`, `RayResourcePool`, …) import it when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_like.dispatch import (
        Dispatch,
        Execute,
        Scatter,
        make_nd_compute_dataproto_dispatch_fn,
        register,
        register_dispatch_mode,
        update_dispatch_mode,
    )
    from verl_like.future import DataProtoFuture, gather
    from verl_like.local_backend import LocalWorkerGroup
    from verl_like.protocol import (
        DataProto,
        DataProtoItem,
        collate_fn,
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        union_numpy_dict,
        union_tensor_dict,
        unpad_dataproto,
    )
    from verl_like.ray_backend import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        merge_resource_pool,
        split_resource_pool,
    )
    from verl_like.resources import Placement, ResourcePool, ResourcePoolManager, Role
    from verl_like.worker import Worker
    from verl_like.worker_group import ClassWithInitArgs, WorkerGroup, create_colocated_worker_cls

_HOME = {
    "ClassWithInitArgs": "worker_group",
    "DataProto": "protocol",
    "DataProtoFuture": "future",
    "DataProtoItem": "protocol",
    "Dispatch": "dispatch",
    "Execute": "dispatch",
    "LocalWorkerGroup": "local_backend",
    "Placement": "resources",
    "RayClassWithInitArgs": "ray_backend",
    "RayResourcePool": "ray_backend",
    "RayWorkerGroup": "ray_backend",
    "ResourcePool": "resources",
    "ResourcePoolManager": "resources",
    "Role": "resources",
    "Scatter": "dispatch",
    "Worker": "worker",
    "WorkerGroup": "worker_group",
    "collate_fn": "protocol",
    "create_colocated_worker_cls": "worker_group",
    "fold_batch_dim": "protocol",
    "gather": "future",
    "make_nd_compute_dataproto_dispatch_fn": "dispatch",
    "merge_resource_pool": "ray_backend",
    "pad_dataproto_to_divisor": "protocol",
    "register": "dispatch",
    "register_dispatch_mode": "dispatch",
    "split_resource_pool": "ray_backend",
    "unfold_batch_dim": "protocol",
    "union_numpy_dict": "protocol",
    "union_tensor_dict": "protocol",
    "unpad_dataproto": "protocol",
    "update_dispatch_mode": "dispatch",
}
__all__ = [
    "ClassWithInitArgs",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Execute",
    "LocalWorkerGroup",
    "Placement",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "Scatter",
    "Worker",
    "WorkerGroup",
    "collate_fn",
    "create_colocated_worker_cls",
    "fold_batch_dim",
    "gather",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "pad_dataproto_to_divisor",
    "register",
    "register_dispatch_mode",
    "split_resource_pool",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "update_dispatch_mode",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _HOME:
        raise AttributeError(f"module 'verl_like' has no attribute '{name}'")
    return getattr(importlib.import_module(f"verl_like.{_HOME[name]}"), name)
