"""The names that users import: `GRPO`, `Environment`, `Worker`, `DataProto`, `register`, ...

Each name is imported on first use, so `import verl_like` is quick and loads neither torch nor ray.
This is the only module of the package that names `trainer` and `workers`, which are above it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` itself: type checkers take the name as public
    from trainer.api.recipes import DPO as DPO
    from trainer.api.recipes import GRPO as GRPO
    from trainer.api.recipes import PPO as PPO
    from trainer.api.recipes import SFT as SFT
    from trainer.api.recipes import AsyncPPO as AsyncPPO
    from trainer.api.recipes import RewardModel as RewardModel
    from trainer.check_loss import check_loss as check_loss
    from trainer.launch import run as run
    from trainer.loop import Trainer as Trainer
    from trainer.migrate.systems import migrate as migrate
    from trainer.ppo.config import PPOConfig as PPOConfig
    from trainer.ppo.recipe import load_config as load_config
    from trainer.ppo.stages import PPOTrainer as PPOTrainer
    from trainer.run_folder.result import RunResult as RunResult
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
    from verl_like.batch.ragged import Ragged as Ragged
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
    from verl_like.calls.result import CallMetrics as CallMetrics
    from verl_like.calls.result import Result as Result
    from verl_like.calls.verl_surface import scatter_lists as scatter_lists
    from verl_like.errors import ConfigError as ConfigError
    from verl_like.errors import PlacementError as PlacementError
    from verl_like.placement.plan import Placement as Placement
    from verl_like.placement.pools import Node as Node
    from verl_like.placement.pools import ResourcePool as ResourcePool
    from verl_like.placement.roles import Role as Role
    from verl_like.process.worker import Worker as Worker
    from verl_like.process.worker import (
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )
    from workers.agents import Adapter as Adapter
    from workers.agents import Environment as Environment
    from workers.agents import TrajectoryEnd as TrajectoryEnd
    from workers.agents import Turn as Turn
    from workers.columns import read_columns as read_columns
    from workers.columns import write_columns as write_columns
    from workers.config import FSDPConfig as FSDPConfig
    from workers.config import ModelConfig as ModelConfig
    from workers.config import OptimConfig as OptimConfig
    from workers.losses.aggregate import agg_loss as agg_loss
    from workers.losses.registry import reads_keys as reads_keys
    from workers.rewards.functions import default_compute_score as default_compute_score

_MODULE_OF = {
    "Adapter": "workers.agents",
    "ClassWithInitArgs": "verl_like.calls.group",
    "ConfigError": "verl_like.errors",
    "DPO": "trainer.api.recipes",
    "DataProto": "verl_like.batch.protocol",
    "DataProtoFuture": "verl_like.calls.future",
    "DataProtoItem": "verl_like.batch.protocol",
    "AsyncPPO": "trainer.api.recipes",
    "Dispatch": "verl_like.calls.dispatch",
    "TrajectoryEnd": "workers.agents",
    "Environment": "workers.agents",
    "Execute": "verl_like.calls.dispatch",
    "FSDPConfig": "workers.config",
    "GRPO": "trainer.api.recipes",
    "LocalWorkerGroup": "verl_like.backends.local",
    "CallMetrics": "verl_like.calls.result",
    "ModelConfig": "workers.config",
    "Node": "verl_like.placement.pools",
    "OptimConfig": "workers.config",
    "PPO": "trainer.api.recipes",
    "PPOConfig": "trainer.ppo.config",
    "PPOTrainer": "trainer.ppo.stages",
    "Placement": "verl_like.placement.plan",
    "PlacementError": "verl_like.errors",
    "Ragged": "verl_like.batch.ragged",
    "RayClassWithInitArgs": "verl_like.backends.ray",
    "RayResourcePool": "verl_like.backends.ray",
    "RayWorkerGroup": "verl_like.backends.ray",
    "ResourcePool": "verl_like.placement.pools",
    "ResourcePoolManager": "verl_like.backends.ray",
    "Result": "verl_like.calls.result",
    "RewardModel": "trainer.api.recipes",
    "Role": "verl_like.placement.roles",
    "RunResult": "trainer.run_folder.result",
    "SFT": "trainer.api.recipes",
    "Scatter": "verl_like.calls.dispatch",
    "Trainer": "trainer.loop",
    "Turn": "workers.agents",
    "Worker": "verl_like.process.worker",
    "WorkerGroup": "verl_like.calls.group",
    "agg_loss": "workers.losses.aggregate",
    "check_loss": "trainer.check_loss",
    "collate_fn": "verl_like.batch.verl_compat",
    "create_colocated_worker_cls": "verl_like.calls.group",
    "create_colocated_worker_raw_cls": "verl_like.process.worker",
    "default_compute_score": "workers.rewards.functions",
    "fold_batch_dim": "verl_like.batch.verl_compat",
    "gather": "verl_like.calls.future",
    "load_config": "trainer.ppo.recipe",
    "make_nd_compute_dataproto_dispatch_fn": "verl_like.calls.dispatch",
    "merge_resource_pool": "verl_like.backends.ray",
    "migrate": "trainer.migrate.systems",
    "pad_dataproto_to_divisor": "verl_like.batch.verl_compat",
    "prepare_dynamic_batch": "verl_like.batch.verl_compat",
    "read_columns": "workers.columns",
    "reads_keys": "workers.losses.registry",
    "rearrange_micro_batches": "verl_like.batch.verl_compat",
    "register": "verl_like.calls.dispatch",
    "register_dispatch_mode": "verl_like.calls.dispatch",
    "restore_dynamic_batch": "verl_like.batch.verl_compat",
    "run": "trainer.launch",
    "scatter_lists": "verl_like.calls.verl_surface",
    "split_resource_pool": "verl_like.backends.ray",
    "unfold_batch_dim": "verl_like.batch.verl_compat",
    "union_numpy_dict": "verl_like.batch.merge",
    "union_tensor_dict": "verl_like.batch.merge",
    "unpad_dataproto": "verl_like.batch.verl_compat",
    "update_dispatch_mode": "verl_like.calls.dispatch",
    "write_columns": "workers.columns",
}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Import a public name from its module on first use."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'verl_like' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULE_OF[name]), name)
