"""A role that reports its place and settings, and a configuration of such roles."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.config.schema import RunConfig, TrainerConfig
from verl_like import Dispatch, Worker, register


class Reporter(Worker):
    """Reports where it runs and its settings."""

    num_closed = 0
    """Workers that this process has closed."""

    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.config = config

    def close(self) -> None:
        type(self).num_closed += 1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def times_closed(self) -> int:
        return self.num_closed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def who(self) -> tuple[str, int]:
        return self.role, os.getpid()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def experiment(self) -> str:
        return self.config.trainer.experiment_name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def device_kind(self) -> str:
        return self.device.type

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def neighbors(self) -> list[str]:
        return sorted(self._siblings)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sum_of_ranks(self) -> float:
        """Sum over all ranks by a collective."""
        self.open_process_group()
        rank = torch.tensor(float(self.rank))
        dist.all_reduce(rank)
        return rank.item()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def interrupt(self, number: int) -> int:
        return number


@dataclass(kw_only=True)
class ReportingConfig(RunConfig):
    """Every role is a `Reporter`; pools named `generator_...` run next to the driver."""

    @property
    def child_pools(self) -> frozenset[str]:
        return frozenset(pool for pool in self.resource_pool_spec if pool.startswith("generator_"))

    def for_role(self, role: str) -> RunConfig:
        return replace(self, trainer=replace(self.trainer, experiment_name=f"run of {role}"))


def reporting(
    folder: Path, roles: dict[str, str], backend: str = "local", **pools: int
) -> ReportingConfig:
    """Return a configuration; `roles` maps role to pool, `pools` has the processes of each."""
    trainer = TrainerConfig(
        backend=backend, n_gpus_per_node=sum(pools.values()), default_local_dir=str(folder)
    )
    return ReportingConfig(
        trainer=trainer,
        resource_pool_spec={pool: [size] for pool, size in pools.items()},
        role_mapping=roles,
        role_workers=dict.fromkeys(roles, f"{__name__}.Reporter"),
        cpus_per_process=0.1,
    )
