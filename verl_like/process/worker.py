"""`Worker`: the base class of every role, which knows its rank, device, siblings and meshes.

A role is a subclass with `@register`ed methods. `verl_like.process.host.WorkerHost` constructs it
inside a worker process (a Ray actor, a child process, or the caller's own thread), within
`construction`, which gives `Worker` its `ProcessInfo`.

    class Critic(Worker):
        def __init__(self, config):
            super().__init__()
        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def compute_values(self, batch: DataProto) -> DataProto: ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore, distributed_c10d  # type: ignore[attr-defined]

from verl_like.calls.dispatch import Dispatch, Execute, register
from verl_like.errors import WorkerError
from verl_like.process.info import ProcessInfo

_process_group_stores: list[Store] = []
"""Holds the store of the default process group, because torch does not keep its Python object."""
_construction: ContextVar[tuple[ProcessInfo, dict[str, Worker]] | None] = ContextVar(
    "verl_like_construction", default=None
)


@contextmanager
def construction(process_info: ProcessInfo, siblings: dict[str, Worker]) -> Iterator[None]:
    """Pass this info and these siblings to the workers that are constructed inside the block."""
    token = _construction.set((process_info, siblings))
    try:
        yield
    finally:
        _construction.reset(token)


def _info_from_environment() -> ProcessInfo:
    """Return the info in torchrun's variables, for a worker that is created outside a group."""
    env = os.environ
    port = env.get("MASTER_PORT")
    process_info = ProcessInfo(
        rank=int(env.get("RANK", 0)),
        world_size=int(env.get("WORLD_SIZE", 1)),
        local_rank=int(env.get("LOCAL_RANK", 0)),
        local_world_size=int(env.get("LOCAL_WORLD_SIZE", 1)),
        master=(env.get("MASTER_ADDR", "127.0.0.1"), int(port)) if port else None,
        device_kind="cuda" if torch.cuda.is_available() else "cpu",
    )
    # inside a group's process LOCAL_RANK is the index of the device, see `torchrun_environment`
    local_rank = int(env.get("RAY_LOCAL_RANK", process_info.local_rank))
    return replace(
        process_info, local_rank=local_rank, device_index=process_device(process_info).index
    )


def process_device(process_info: ProcessInfo) -> torch.device:
    """Return the device that a process computes on.

    `WorkerHost` stores the device's index when the process starts, because the devices that are
    visible to the process may change while an engine starts.
    """
    if process_info.device_kind != "cuda":
        return torch.device("cpu")
    if process_info.device_index is not None:
        return torch.device("cuda", process_info.device_index)
    return torch.device("cuda", 0 if torch.cuda.device_count() == 1 else process_info.local_rank)


class Worker:
    """Base class of roles: an instance is one role in one process.

        class Critic(Worker):
            def __init__(self, config):
                super().__init__()
                self.model = build(config).to(self.device)

            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def compute_values(self, batch: DataProto) -> DataProto: ...

    The driver calls `@register`ed methods on the ranks of a group. A run calls every role's
    `init_model` before the first step. A role with trainable state overrides `save_checkpoint` and
    `load_checkpoint`.
    """

    _process_info: ProcessInfo
    _siblings: dict[str, Worker]
    _mesh_positions: dict[str, tuple[int, bool]]
    _device: torch.device

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Attach the process's info here, in case a subclass does not call `Worker.__init__`."""
        self = super().__new__(cls)
        self._process_info, self._siblings = _construction.get() or (_info_from_environment(), {})
        self._mesh_positions = {}
        self._device = process_device(self._process_info)
        return self

    def __init__(self) -> None:
        """Do nothing: `__new__` has set rank, role and device."""

    def close(self) -> None:
        """Free resources that garbage collection does not free.

        Called before this role is constructed again in the same process; does nothing by default.
        """

    @property
    def rank(self) -> int:
        """The number of this process in its group, from 0 to world_size - 1."""
        return self._process_info.rank

    @property
    def world_size(self) -> int:
        """The number of processes in the group."""
        return self._process_info.world_size

    @property
    def local_rank(self) -> int:
        """The number of this process among the group's processes on its node."""
        return self._process_info.local_rank

    @property
    def local_world_size(self) -> int:
        """The number of the group's processes on this node."""
        return self._process_info.local_world_size

    @property
    def role(self) -> str:
        """The name of this worker's role, such as `critic`."""
        return self._process_info.role

    @property
    def device(self) -> torch.device:
        """The device of this worker's tensors."""
        return self._device

    def sibling(self, role: str) -> Worker | None:
        """Return the worker of another role in this process, or None if it is not here.

        For example, a rollout that shares the actor's module gets it from its sibling `actor`.
        """
        return self._siblings.get(role)

    def open_process_group(self) -> None:
        """Open the default process group, and make the worker's GPU the current device.

        Collective: every rank must call this, and waits for the others. Later calls, from this role
        or a sibling, have no effect. Without a current device, a mesh would use the GPU whose index
        is the environment's `LOCAL_RANK`.
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if dist.is_initialized():
            if dist.get_world_size() != self.world_size:
                raise WorkerError(
                    f"{self.role} rank {self.rank}: this process already has a default process "
                    f"group of {dist.get_world_size()} ranks, but the group needs "
                    f"{self.world_size}. One process serves one pool. Close the other group first "
                    "(torch.distributed.destroy_process_group)."
                )
            return

        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "cpu:gloo"
        limit = timedelta(seconds=self._process_info.call_s)
        if self.device.type == "cuda":
            limit = timedelta(seconds=self._process_info.collective_s)
            # torch's default for later groups, for example of a mesh
            distributed_c10d.default_pg_timeout = limit
        if self.world_size == 1:
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=limit)
            return

        address, port = self.get_master_addr_port()
        try:
            store = self._meet(address, port)
            dist.init_process_group(
                backend, store=store, rank=self.rank, world_size=self.world_size, timeout=limit
            )
        except WorkerError:
            raise
        except (RuntimeError, dist.DistError) as error:
            raise WorkerError(
                f"rendezvous of {self.role} rank {self.rank} of {self.world_size} at "
                f"{address}:{port} failed (limit {self._process_info.rendezvous_s:.0f} s, "
                f"timeouts.rendezvous_s): {error}"
            ) from error

    def _meet(self, address: str, port: int) -> Store:
        """Wait until every rank has connected, and return the group's store.

        An error names the missing ranks.
        """
        limit = timedelta(seconds=self._process_info.rendezvous_s)
        server = TCPStore(address, port, self.world_size, is_master=False, timeout=limit)
        from verl_like.process.store import SignedStore

        store = SignedStore(server, self._process_info.secret, "default")
        store.set(f"rank {self.rank}", "here")
        names = [f"rank {rank}" for rank in range(self.world_size)]
        try:
            store.wait(names, limit)
        except dist.DistError as error:
            missing = [name for name in names if not store.check([name])]
            raise WorkerError(
                f"{self.role} rank {self.rank} of {self.world_size} waited "
                f"{self._process_info.rendezvous_s:.0f} s (timeouts.rendezvous_s) at "
                f"{address}:{port} for {', '.join(missing)} to open the process group."
            ) from error
        _process_group_stores[:] = [store]
        return store if self.device.type == "cpu" else store.unsigned("group")

    def get_master_addr_port(self) -> tuple[str, int]:
        """Return host and port of the group's store, which rank 0 serves."""
        if self._process_info.master is None:
            raise WorkerError(
                f"{self.role} rank {self.rank}: no rendezvous address. Start the worker through a "
                "WorkerGroup."
            )
        return self._process_info.master

    def _register_dispatch_collect_info(
        self, mesh_name: str, dp_rank: int, is_collect: bool
    ) -> None:
        """Register which data-parallel slice of a mesh this rank computes.

        Of the ranks with the same slice, only the one with `is_collect` returns its result to the
        driver.
        """
        position = int(dp_rank), bool(is_collect)
        if self._mesh_positions.get(mesh_name) != position:  # a new dict shows that it has changed
            self._mesh_positions = {**self._mesh_positions, mesh_name: position}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, concurrent=True)
    def ping(self) -> None:
        """Return immediately, even while the process computes."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def answer_in_turn(self) -> None:
        """Do nothing; the call returns once all earlier calls of this process have ended."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, path: str, step: int = 0) -> None:
        """Write the state that a resume after `step` needs into the folder `path`.

        By default, this saves the role's random state on this rank. A role with trainable state
        overrides this method and `load_checkpoint`.
        """
        Path(path).mkdir(parents=True, exist_ok=True)
        from verl_like.process.random_state import save_random_state

        save_random_state(Path(path) / f"{self.rank}.json")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_checkpoint(self, path: str, step: int = 0) -> bool:
        """Save a checkpoint; return True if files are still being written in the background.

        The driver calls this method if `trainer.async_save` is true; see
        `workers.training.checkpoints.background_copies`.
        """
        self.save_checkpoint(path, step)
        return False

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        """Restore the state that `save_checkpoint` wrote, if there is one for this rank."""
        saved = Path(path) / f"{self.rank}.json"
        if saved.is_file():
            from verl_like.process.random_state import load_random_state

            load_random_state(saved)

    @register(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.RANK_ZERO)
    def execute_func_rank_zero(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `func(*args, **kwargs)` only on rank 0, and return its result."""
        return func(*args, **kwargs)
