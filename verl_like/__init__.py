"""One driver, groups of workers on named pools, and a `DataProto` that each call splits and
collects.

The public names are listed here. Each is imported when it is first used, so `import verl_like` is
quick and loads neither torch nor ray. The names of the Ray backend load ray on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # each name as itself: for type checkers it is one of this module, too
    from verl_like.backends.local import LocalWorkerGroup as LocalWorkerGroup
    from verl_like.backends.ray import RayClassWithInitArgs as RayClassWithInitArgs
    from verl_like.backends.ray import RayResourcePool as RayResourcePool
    from verl_like.backends.ray import RayWorkerGroup as RayWorkerGroup
    from verl_like.backends.ray import ResourcePoolManager as ResourcePoolManager
    from verl_like.backends.ray import merge_resource_pool as merge_resource_pool
    from verl_like.backends.ray import split_resource_pool as split_resource_pool
    from verl_like.batch.merge import union_numpy_dict as union_numpy_dict
    from verl_like.batch.merge import union_tensor_dict as union_tensor_dict
    from verl_like.batch.protocol import DataProto as DataProto
    from verl_like.batch.protocol import DataProtoItem as DataProtoItem
    from verl_like.batch.verl_compat import collate_fn as collate_fn
    from verl_like.batch.verl_compat import fold_batch_dim as fold_batch_dim
    from verl_like.batch.verl_compat import pad_dataproto_to_divisor as pad_dataproto_to_divisor
    from verl_like.batch.verl_compat import prepare_dynamic_batch as prepare_dynamic_batch
    from verl_like.batch.verl_compat import rearrange_micro_batches as rearrange_micro_batches
    from verl_like.batch.verl_compat import restore_dynamic_batch as restore_dynamic_batch
    from verl_like.batch.verl_compat import unfold_batch_dim as unfold_batch_dim
    from verl_like.batch.verl_compat import unpad_dataproto as unpad_dataproto
    from verl_like.calls.dispatch import Dispatch as Dispatch
    from verl_like.calls.dispatch import Execute as Execute
    from verl_like.calls.dispatch import Scatter as Scatter
    from verl_like.calls.dispatch import (
        make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
    )
    from verl_like.calls.dispatch import register as register
    from verl_like.calls.dispatch import register_dispatch_mode as register_dispatch_mode
    from verl_like.calls.dispatch import update_dispatch_mode as update_dispatch_mode
    from verl_like.calls.future import DataProtoFuture as DataProtoFuture
    from verl_like.calls.future import gather as gather
    from verl_like.calls.group import ClassWithInitArgs as ClassWithInitArgs
    from verl_like.calls.group import WorkerGroup as WorkerGroup
    from verl_like.calls.group import (
        create_colocated_worker_cls as create_colocated_worker_cls,
    )
    from verl_like.calls.result import Metrics as Metrics
    from verl_like.calls.result import Result as Result
    from verl_like.calls.verl_surface import scatter_lists as scatter_lists
    from verl_like.placement.plan import Placement as Placement
    from verl_like.placement.pools import ResourcePool as ResourcePool
    from verl_like.placement.roles import Role as Role
    from verl_like.process.worker import Worker as Worker
    from verl_like.process.worker import (
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )

_MODULE_OF = {
    "ClassWithInitArgs": "calls.group",
    "DataProto": "batch.protocol",
    "DataProtoFuture": "calls.future",
    "DataProtoItem": "batch.protocol",
    "Dispatch": "calls.dispatch",
    "Execute": "calls.dispatch",
    "LocalWorkerGroup": "backends.local",
    "Metrics": "calls.result",
    "Placement": "placement.plan",
    "RayClassWithInitArgs": "backends.ray",
    "RayResourcePool": "backends.ray",
    "RayWorkerGroup": "backends.ray",
    "ResourcePool": "placement.pools",
    "ResourcePoolManager": "backends.ray",
    "Result": "calls.result",
    "Role": "placement.roles",
    "Scatter": "calls.dispatch",
    "Worker": "process.worker",
    "WorkerGroup": "calls.group",
    "collate_fn": "batch.verl_compat",
    "create_colocated_worker_cls": "calls.group",
    "create_colocated_worker_raw_cls": "process.worker",
    "fold_batch_dim": "batch.verl_compat",
    "gather": "calls.future",
    "make_nd_compute_dataproto_dispatch_fn": "calls.dispatch",
    "merge_resource_pool": "backends.ray",
    "pad_dataproto_to_divisor": "batch.verl_compat",
    "prepare_dynamic_batch": "batch.verl_compat",
    "rearrange_micro_batches": "batch.verl_compat",
    "register": "calls.dispatch",
    "register_dispatch_mode": "calls.dispatch",
    "restore_dynamic_batch": "batch.verl_compat",
    "scatter_lists": "calls.verl_surface",
    "split_resource_pool": "backends.ray",
    "unfold_batch_dim": "batch.verl_compat",
    "union_numpy_dict": "batch.merge",
    "union_tensor_dict": "batch.merge",
    "unpad_dataproto": "batch.verl_compat",
    "update_dispatch_mode": "calls.dispatch",
}
_TOOLS = {"check_loss": "trainer.check_loss"}
"""Public name of a tool, which imports this package -> its module."""
__all__ = sorted([*_MODULE_OF, *_TOOLS])


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name in _TOOLS:
        return getattr(importlib.import_module(_TOOLS[name]), name)
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'verl_like' has no attribute '{name}'")
    return getattr(importlib.import_module(f"verl_like.{_MODULE_OF[name]}"), name)
