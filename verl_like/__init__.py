"""One driver, groups of workers on named pools, a `DataProto` split and collected per call.

The public names are listed here. Each is imported when it is first used, so `import verl_like` is
quick and loads neither torch nor ray; `RayWorkerGroup`, `RayResourcePool`, `ResourcePoolManager`
and their kin then load ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl_like.backends.local.group import LocalWorkerGroup
    from verl_like.backends.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        ResourcePoolManager,
        merge_resource_pool,
        split_resource_pool,
    )
    from verl_like.batch.dynamic import (
        prepare_dynamic_batch,
        rearrange_micro_batches,
        restore_dynamic_batch,
    )
    from verl_like.batch.functions import (
        collate_fn,
        fold_batch_dim,
        pad_dataproto_to_divisor,
        unfold_batch_dim,
        unpad_dataproto,
    )
    from verl_like.batch.merge import union_numpy_dict, union_tensor_dict
    from verl_like.batch.protocol import DataProto, DataProtoItem
    from verl_like.calls.dispatch import (
        Dispatch,
        Execute,
        Scatter,
        make_nd_compute_dataproto_dispatch_fn,
        register,
        register_dispatch_mode,
        scatter_lists,
        update_dispatch_mode,
    )
    from verl_like.calls.future import DataProtoFuture, gather
    from verl_like.calls.group import WorkerGroup
    from verl_like.calls.result import Metrics, Result
    from verl_like.calls.worker_classes import ClassWithInitArgs, create_colocated_worker_cls
    from verl_like.placement.plan import Placement
    from verl_like.placement.pools import ResourcePool
    from verl_like.placement.roles import Role
    from verl_like.process.colocated import create_colocated_worker_raw_cls
    from verl_like.process.worker import Worker

_MODULE_OF = {
    "ClassWithInitArgs": "calls.worker_classes",
    "DataProto": "batch.protocol",
    "DataProtoFuture": "calls.future",
    "DataProtoItem": "batch.protocol",
    "Dispatch": "calls.dispatch",
    "Execute": "calls.dispatch",
    "LocalWorkerGroup": "backends.local.group",
    "Metrics": "calls.result",
    "Placement": "placement.plan",
    "RayClassWithInitArgs": "backends.ray",
    "RayResourcePool": "backends.ray",
    "RayWorkerGroup": "backends.ray",
    "ResourcePool": "placement.pools",
    "Result": "calls.result",
    "ResourcePoolManager": "backends.ray",
    "Role": "placement.roles",
    "Scatter": "calls.dispatch",
    "Worker": "process.worker",
    "WorkerGroup": "calls.group",
    "collate_fn": "batch.functions",
    "create_colocated_worker_cls": "calls.worker_classes",
    "create_colocated_worker_raw_cls": "process.colocated",
    "fold_batch_dim": "batch.functions",
    "gather": "calls.future",
    "make_nd_compute_dataproto_dispatch_fn": "calls.dispatch",
    "merge_resource_pool": "backends.ray",
    "pad_dataproto_to_divisor": "batch.functions",
    "prepare_dynamic_batch": "batch.dynamic",
    "rearrange_micro_batches": "batch.dynamic",
    "register": "calls.dispatch",
    "register_dispatch_mode": "calls.dispatch",
    "restore_dynamic_batch": "batch.dynamic",
    "scatter_lists": "calls.dispatch",
    "split_resource_pool": "backends.ray",
    "unfold_batch_dim": "batch.functions",
    "union_numpy_dict": "batch.merge",
    "union_tensor_dict": "batch.merge",
    "unpad_dataproto": "batch.functions",
    "update_dispatch_mode": "calls.dispatch",
}
__all__ = [
    "ClassWithInitArgs",
    "DataProto",
    "DataProtoFuture",
    "DataProtoItem",
    "Dispatch",
    "Execute",
    "LocalWorkerGroup",
    "Metrics",
    "Placement",
    "RayClassWithInitArgs",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Result",
    "Role",
    "Scatter",
    "Worker",
    "WorkerGroup",
    "collate_fn",
    "create_colocated_worker_cls",
    "create_colocated_worker_raw_cls",
    "fold_batch_dim",
    "gather",
    "make_nd_compute_dataproto_dispatch_fn",
    "merge_resource_pool",
    "pad_dataproto_to_divisor",
    "prepare_dynamic_batch",
    "rearrange_micro_batches",
    "register",
    "register_dispatch_mode",
    "restore_dynamic_batch",
    "scatter_lists",
    "split_resource_pool",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
    "update_dispatch_mode",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'verl_like' has no attribute '{name}'")
    return getattr(importlib.import_module(f"verl_like.{_MODULE_OF[name]}"), name)
