"""Methods for drivers and workers that were written for verl.

`VerlGroup` calls methods by their name, `VerlWorker` has the methods that verl's workers call on
themselves, and `scatter_lists` treats lists as verl does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from verl_like.calls.dispatch import (
    ATTRIBUTE,
    CallTarget,
    Dispatch,
    Execute,
    Mode,
    Registration,
    collect_list,
    dispatch_all_to_all,
    dispatch_dp_compute,
    register,
)
from verl_like.errors import DispatchError, nearest
from verl_like.process.machine import address_toward

if TYPE_CHECKING:
    from verl_like.calls.future import WorkerFuture


def scatter_lists() -> None:
    """Let `ALL_TO_ALL` scatter lists as verl does, in groups that are made from now on.

    If every argument is a list with one element per worker, each worker gets its elements.
    `execute_all_sync` and its variants do the same, even in groups that exist. As in verl, this is
    a guess: a list that has this length by chance is scattered, too. Drivers that are written for
    this project use `PerRank`.
    """
    Dispatch.ALL_TO_ALL.mode = Mode(_dispatch_lists, collect_list)


def _dispatch_lists(target: CallTarget, /, *args: Any, **kwargs: Any) -> Any:
    values = [*args, *kwargs.values()]
    if values and all(isinstance(v, list) and len(v) == target.world_size for v in values):
        return dispatch_dp_compute(target, *args, **kwargs)
    return dispatch_all_to_all(target, *args, **kwargs)


class VerlGroup:
    """A worker group's methods for verl's drivers."""

    name: str
    roles: dict[str, type]
    prefixed: frozenset[str]
    spawn: Callable[[Iterable[str]], dict[str, Any]]
    bind: Callable[[str, str, Callable[..., Any], Registration], Any]

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method by its name on every worker, and return their results in rank order.

        The method need not be registered. Every worker gets all the arguments, but of a `PerRank`
        only its element.
        """
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run a method by its name on every worker, and return a future of their results."""
        future: WorkerFuture = self._by_name(method_name, Execute.ALL).remote(*args, **kwargs)
        return future

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method by its name only on rank 0, and return its result."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run a method by its name only on rank 0, and return a future of its result."""
        method = self._by_name(method_name, Execute.RANK_ZERO)
        future: WorkerFuture = method.remote(*args, **kwargs)
        return future

    def methods_by_name(self) -> dict[str, tuple[str, str, Callable[..., Any]]]:
        """Map the name on the group of every method of the workers to role, method and function."""
        methods = {}
        for role, cls in self.roles.items():
            for method in dir(cls):
                if not method.startswith("__") and callable(getattr(cls, method)):
                    key = f"{role}_{method}" if role in self.prefixed else method
                    methods[key] = role, method, getattr(cls, method)
        return methods

    def _by_name(self, name: str, execute_mode: Execute) -> Any:
        """Return a method of the workers, which need not be registered."""
        methods = self.methods_by_name()
        if name not in methods:
            raise DispatchError(
                f"the workers of {self.name} have no method '{name}'.{nearest(name, methods)}"
            )
        role, method, function = methods[name]
        mark = getattr(function, ATTRIBUTE, Registration(Dispatch.ALL_TO_ALL, execute_mode))
        mark = replace(mark, dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=execute_mode)
        return self.bind(role, method, function, mark)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make every role's group an attribute of this group."""
        for role, group in self.spawn(prefix_set).items():
            if hasattr(self, role):
                raise DispatchError(
                    f"role '{role}' would shadow an attribute of group {self.name}. Rename the "
                    "role."
                )
            setattr(self, role, group)


class VerlWorker:
    """A worker's methods for workers that are written for verl."""

    if TYPE_CHECKING:

        @property
        def role(self) -> str: ...  # noqa: D102

        @property
        def rank(self) -> int: ...  # noqa: D102

    _process_info: Any
    _siblings: dict[str, Any]
    _mesh_positions: dict[str, tuple[int, bool]]
    _register_dispatch_collect_info: Callable[[str, int, bool], None]

    @property
    def fused_worker_dict(self) -> dict[str, Any]:
        """The workers of this process, by role."""
        return self._siblings

    def get_available_master_addr_port(self) -> tuple[str, int]:
        """Return this node's address and a port that is free now.

        Another process may take the port before you use it: prefer a TCPStore, which binds it.
        """
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        if self._process_info.master is None:
            return "127.0.0.1", port
        return address_toward(self._process_info.master[0]), port

    def get_cuda_visible_devices(self) -> str:
        """Return `CUDA_VISIBLE_DEVICES` of this process, or "not set"."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "not set")

    def get_dispatch_collect(self) -> dict[str, dict[str, Any]]:
        """Return this rank's place on every mesh that it registered, for `set_dispatch_collect`."""
        places = self._mesh_positions.items()
        return {
            "dispatch_dp_rank": {mesh: dp_rank for mesh, (dp_rank, _) in places},
            "collect_dp_rank": {mesh: is_collect for mesh, (_, is_collect) in places},
        }

    def set_dispatch_collect(
        self, mesh_name: str, dispatch_dp_rank: dict[str, int], collect_dp_rank: dict[str, bool]
    ) -> None:
        """Register a mesh with the places of another worker's mesh.

        The arguments come from that worker's `get_dispatch_collect`.
        """
        if mesh_name in self._mesh_positions:
            raise DispatchError(
                f"{self.role} rank {self.rank} has already registered mesh '{mesh_name}'. "
                f"Registered: {', '.join(self._mesh_positions)}. Use another name."
            )
        places = {(dp, collect_dp_rank[mesh]) for mesh, dp in dispatch_dp_rank.items()}
        if len(places) != 1:
            raise DispatchError(
                f"set_dispatch_collect: mesh '{mesh_name}' of {self.role} rank {self.rank} takes "
                "its place from the other worker, whose meshes must all have the same dispatch "
                f"rank and collect flag, but they have {len(places)} different places: "
                f"{dispatch_dp_rank}, {collect_dp_rank}. Call "
                "_register_dispatch_collect_info(mesh_name, dp_rank, is_collect) instead."
            )
        self._register_dispatch_collect_info(mesh_name, *places.pop())

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_dispatch_info(self, mesh_name: str) -> int:
        return self._place_on(mesh_name)[0]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def _query_collect_info(self, mesh_name: str) -> bool:
        """Return whether this rank's result is collected on a mesh."""
        return self._place_on(mesh_name)[1]

    def _place_on(self, mesh_name: str) -> tuple[int, bool]:
        if mesh_name not in self._mesh_positions:
            raise DispatchError(
                f"{self.role} rank {self.rank} has not registered mesh '{mesh_name}'."
                f"{nearest(mesh_name, self._mesh_positions)} Registered: "
                f"{', '.join(self._mesh_positions) or 'none'}."
            )
        return self._mesh_positions[mesh_name]

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO_WITH_FUNC)
    def execute_with_func_generator(
        self, func: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run `func(worker, *slices)` on every rank."""
        return func(self, *args, **kwargs)
