"""The names that you import to run training, and to write drivers: `GRPO`, `Environment`, `Worker`.

`verl_like.extend` has the names for authors of roles, engines, losses and recipes. Each name is
imported on first use, so `import verl_like` is quick and loads neither torch nor ray. Only these
two modules of the package name `trainer` and `workers`, the packages that import `verl_like`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.lazy import import_name, names_by_block

# `X as X` tells type checkers that the name is public
if TYPE_CHECKING:  # start here: recipes, environments, hooks, and the results of runs
    from trainer.api.recipes import DPO as DPO
    from trainer.api.recipes import GRPO as GRPO
    from trainer.api.recipes import KTO as KTO
    from trainer.api.recipes import PPO as PPO
    from trainer.api.recipes import SFT as SFT
    from trainer.api.recipes import AsyncPPO as AsyncPPO
    from trainer.api.recipes import RewardModelTraining as RewardModelTraining
    from trainer.hooks import Hooks as Hooks
    from trainer.launch import run as run
    from trainer.ppo.config import PPOConfig as PPOConfig
    from trainer.ppo.recipe import load_config as load_config
    from trainer.run_folder.result import RunResult as RunResult
    from trainer.run_folder.signals import RunInterrupted as RunInterrupted
    from trainer.tools.check_loss import check_loss as check_loss
    from trainer.tools.migrate.systems import migrate as migrate
    from trainer.tools.report.page import write_report as write_report
    from workers.agents import Environment as Environment
    from workers.agents import EnvironmentAdapter as EnvironmentAdapter
    from workers.agents import Observation as Observation
    from workers.agents import TrajectoryEnd as TrajectoryEnd
    from workers.rewards.functions import default_compute_score as default_compute_score
if TYPE_CHECKING:  # for your own roles and drivers: workers, batches, calls, placement
    from verl_like.backends.local import LocalWorkerGroup as LocalWorkerGroup
    from verl_like.backends.ray import RayClassWithInitArgs as RayClassWithInitArgs
    from verl_like.backends.ray import RayResourcePool as RayResourcePool
    from verl_like.backends.ray import RayWorkerGroup as RayWorkerGroup
    from verl_like.batch.protocol import DataProto as DataProto
    from verl_like.batch.ragged import RaggedTensor as RaggedTensor
    from verl_like.calls.dispatch import Dispatch as Dispatch
    from verl_like.calls.dispatch import PerRank as PerRank
    from verl_like.calls.dispatch import register as register
    from verl_like.calls.future import DataProtoFuture as DataProtoFuture
    from verl_like.calls.future import gather as gather
    from verl_like.calls.group import ClassWithInitArgs as ClassWithInitArgs
    from verl_like.calls.group import create_colocated_worker_cls as create_colocated_worker_cls
    from verl_like.errors import ConfigError as ConfigError
    from verl_like.errors import VerlLikeError as VerlLikeError
    from verl_like.placement.plan import Placement as Placement
    from verl_like.placement.pools import NodeSpec as NodeSpec
    from verl_like.placement.pools import ResourcePool as ResourcePool
    from verl_like.process.worker import Worker as Worker
if TYPE_CHECKING:  # for code of verl's single controller: importable, but not in `__all__`
    from verl_like.backends.ray import ResourcePoolManager as ResourcePoolManager
    from verl_like.backends.ray import merge_resource_pool as merge_resource_pool
    from verl_like.backends.ray import split_resource_pool as split_resource_pool
    from verl_like.balance import (
        get_group_balanced_partitions as get_group_balanced_partitions,
    )
    from verl_like.balance import get_reverse_idx as get_reverse_idx
    from verl_like.balance import (
        get_seqlen_balanced_partitions as get_seqlen_balanced_partitions,
    )
    from verl_like.batch.protocol import DataProtoItem as DataProtoItem
    from verl_like.calls.dispatch import Execute as Execute
    from verl_like.calls.dispatch import (
        make_nd_compute_dataproto_dispatch_fn as make_nd_compute_dataproto_dispatch_fn,
    )
    from verl_like.calls.dispatch import register_dispatch_mode as register_dispatch_mode
    from verl_like.calls.dispatch import update_dispatch_mode as update_dispatch_mode
    from verl_like.calls.group import WorkerGroup as WorkerGroup
    from verl_like.placement.pools import Role as Role
    from verl_like.verl.groups import scatter_lists as scatter_lists
    from verl_like.verl.workers import (
        create_colocated_worker_raw_cls as create_colocated_worker_raw_cls,
    )
if TYPE_CHECKING:  # for the command verl-like
    from trainer.cli.main import main as main

_RUNS, _DRIVERS, _VERL, _COMMAND = names_by_block(__file__)
__all__ = sorted(_RUNS | _DRIVERS)


def __getattr__(name: str) -> Any:
    return import_name(__name__, _RUNS | _DRIVERS | _VERL | _COMMAND, name)


def __dir__() -> list[str]:
    """Return the names that completion suggests."""
    return __all__
