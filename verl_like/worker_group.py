"""`WorkerGroup`: what the driver holds. It grows one method for every registered method of its workers.

    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(Critic, config))
    group.init_model()                        # obeys the method's `blocking`
    future = group.update_critic.remote(batch)    # always a future

Several roles share the processes of one pool when they are fused first: methods are then `<role>_<method>` on the fused
group, and plain `<method>` on the groups that `spawn` gives:

    fused = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls({"actor": a, "ref": b}))
    groups = fused.spawn(["actor", "ref"])
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from verl_like.columns import tensors_of
from verl_like.dispatch import Execute, Mode, Registration, mode_of, registered_methods
from verl_like.errors import DispatchError, PlacementError, nearest
from verl_like.future import DataProtoFuture, PartFuture, WorkerFuture
from verl_like.protocol import DataProto
from verl_like.split import FutureShard
from verl_like.transport import Call, Header, Pending, PieceSlot, Slot, Transport, WholeSlot

SHARED_BYTES = 100_000


class ClassWithInitArgs:
    """A worker class and its constructor's arguments, to be constructed later in a worker process."""

    fused = False

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        """Nothing is constructed yet."""
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def roles(self, default: str) -> dict[str, ClassWithInitArgs]:
        """The roles that one process will hold: this one, under a default name."""
        return {default: self}


class ColocatedClasses(ClassWithInitArgs):
    """Several roles for one process; made by `create_colocated_worker_cls`."""

    fused = True

    def __init__(self, class_dict: dict[str, ClassWithInitArgs]) -> None:
        """Roles are constructed in the order given."""
        super().__init__(object)
        self.class_dict = dict(class_dict)

    def roles(self, default: str) -> dict[str, ClassWithInitArgs]:
        """Every role by its name."""
        return self.class_dict


def create_colocated_worker_cls(class_dict: dict[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Fuse roles: one process per device holds one instance of each."""
    if not class_dict:
        raise PlacementError("create_colocated_worker_cls needs at least one role.")
    return ColocatedClasses(class_dict)


class CallSite:
    """Names for messages while a call is being dispatched.

    `critic.compute_values`, and what the method calls its arguments.
    """

    def __init__(self, name: str, method: Callable[..., Any]):
        """Parameters are those after `self`."""
        self.name = name
        self.parameters = list(inspect.signature(method).parameters)[1:]

    def __str__(self) -> str:
        return self.name

    def argument(self, position: int) -> str:
        """The name of a positional argument."""
        if position < len(self.parameters):
            return f"argument '{self.parameters[position]}'"
        return f"argument {position}"


class BoundMethod:
    """A registered method on a group: call it, or call `.remote` for a future whatever its `blocking` says."""

    def __init__(self, group: WorkerGroup, role: str, method: str, function: Callable[..., Any], mark: Registration):
        """Made by `WorkerGroup` for every registered method."""
        self.group, self.role, self.method, self.mark = group, role, method, mark
        self.site = CallSite(f"{role}.{method}", function)
        self.mode: Mode = mode_of(mark.dispatch_mode, self.site.name)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; waits if the method was registered with `blocking=True`."""
        future = self.remote(*args, **kwargs)
        return future.get() if self.mark.blocking else future

    def remote(self, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run it and return a future at once."""
        group = self.group
        group.call_site = self.site
        split_args, split_kwargs = self.mode.dispatch_fn(group, *args, **kwargs)
        for name, values in [*enumerate(split_args), *split_kwargs.items()]:
            if not isinstance(values, (list, tuple)) or len(values) != group.world_size:
                raise DispatchError(
                    f"{self.site}: the dispatch function must give a list with one element per worker "
                    f"({group.world_size}) for "
                    f"every argument; for argument {name!r} it gave {type(values).__name__}."
                )
        only_first = (
            self.mark.execute_mode is Execute.RANK_ZERO or getattr(self.mark.dispatch_mode, "name", "") == "RANK_ZERO"
        )
        ranks = [0] if only_first else range(group.world_size)
        sender = _Sender(group.transport, self.mark.materialize_futures)
        calls = []
        for rank in ranks:
            call_args = tuple(values[rank] for values in split_args)
            calls.append((rank, call_args, {name: values[rank] for name, values in split_kwargs.items()}))
        pending = [sender.submit(rank, self.role, self.method, a, k) for rank, a, k in calls]
        kind = DataProtoFuture if self.mode.data_parallel else WorkerFuture
        return kind(self.site.name, group.transport, pending, self._collector(only_first))

    def _collector(self, only_first: bool) -> Callable[[list[Header], list[Any]], Any]:
        def collect(headers: list[Header], outputs: list[Any]) -> Any:
            self.group.learn_mesh_facts(headers)
            self.group.call_site = self.site
            return outputs[0] if only_first else self.mode.collect_fn(self.group, outputs)

        return collect


class _Sender:
    """Turns the arguments of one dispatched call into what travels.

    Values, shared values, and references to other results.
    """

    def __init__(self, transport: Transport, materialize: bool):
        self.transport, self.materialize = transport, materialize
        self._shared: dict[int, tuple[Any, Any]] = {}
        self._regrouped: dict[tuple[int, int], list[Pending]] = {}

    def submit(self, rank: int, role: str, method: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Pending:
        parts: list[Any] = []
        packed = tuple(self._pack(value, parts) for value in args)
        named = {name: self._pack(value, parts) for name, value in kwargs.items()}
        return self.transport.submit(rank, Call(role, method, packed, named), parts)

    def _pack(self, value: Any, parts: list[Any]) -> Any:
        if isinstance(value, FutureShard):
            if value.future.transport.kind != self.transport.kind:
                raise DispatchError(
                    f"{value.future.name}: its result lives on another backend; pass on future.get() instead."
                )
            pieces = self._pieces(value)
            headers = tuple(_add(parts, piece.header) for piece in pieces)
            return PieceSlot(_add(parts, pieces[value.index].payload), headers, value.index)
        if isinstance(value, PartFuture) and self.materialize:
            return value.get()
        if isinstance(value, WorkerFuture) and self.materialize:
            if value.transport.kind != self.transport.kind:
                return value.get()
            headers = tuple(_add(parts, pending.header) for pending in value.pending)
            return WholeSlot(tuple(_add(parts, pending.payload) for pending in value.pending), headers)
        if _num_bytes(value) >= SHARED_BYTES:
            if id(value) not in self._shared:
                self._shared[id(value)] = value, self.transport.share(value)
            return Slot(_add(parts, self._shared[id(value)][1]))
        return value

    def _pieces(self, shard: FutureShard) -> list[Pending]:
        if len(shard.future.pending) == shard.count:
            return shard.future.pending
        key = id(shard.future), shard.count
        if key not in self._regrouped:
            self._regrouped[key] = self.transport.regroup(shard.future.pending, shard.count)
        return self._regrouped[key]


def _add(parts: list[Any], value: Any) -> int:
    parts.append(value)
    return len(parts) - 1


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor | np.ndarray):
        return int(value.nbytes)
    if isinstance(value, DataProto):
        tensors = sum(column.nbytes for column in tensors_of(value.batch).values())
        return tensors + sum(column.nbytes for column in value.non_tensor_batch.values())
    return 0


class WorkerGroup:
    """The workers of one role (or of several, fused) on the processes of one pool.

    Backends subclass it to start the processes.
    """

    def __init__(self, transport: Transport, roles: dict[str, type], prefixed: bool):
        """`roles` maps role to class; with `prefixed`, methods are named `<role>_<method>`."""
        self.transport = transport
        self.roles = dict(roles)
        self.prefixed = prefixed
        self.call_site: CallSite | str = self.name
        self._mesh: dict[str, dict[str, list[tuple[int, bool]]]] = {}
        self.learn_mesh_facts(transport.started)
        for role, cls in self.roles.items():
            for method, function, mark in registered_methods(cls):
                self._bind(f"{role}_{method}" if prefixed else method, BoundMethod(self, role, method, function, mark))

    @property
    def name(self) -> str:
        """The role, or the roles joined by "+"."""
        return "+".join(self.roles)

    @property
    def world_size(self) -> int:
        """Processes in the group."""
        return self.transport.world_size

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """One group per role on these same processes, with the role's prefix gone from its methods."""
        spawned = {}
        for role in prefix_set:
            if role not in self.roles:
                raise PlacementError(
                    f"group {self.name} has no role '{role}'.{nearest(role, self.roles)} Roles: "
                    f"{', '.join(self.roles)}."
                )
            spawned[role] = WorkerGroup(self.transport, {role: self.roles[role]}, prefixed=False)
            spawned[role]._mesh = self._mesh
        return spawned

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make every role's group an attribute of this one."""
        for role, group in self.spawn(prefix_set).items():
            self._bind(role, group)

    def shares_processes_with(self, other: WorkerGroup) -> bool:
        """Whether both groups' workers live in the same processes."""
        return self.transport.process_key == other.transport.process_key

    def mesh_facts(self, mesh_name: str) -> list[tuple[int, bool]]:
        """(dp rank, collects?) of every rank on a mesh that the workers registered."""
        for role in self.roles:
            known = self._mesh.get(role, {})
            if mesh_name in known:
                return known[mesh_name]
        names = sorted({name for role in self.roles for name in self._mesh.get(role, {})})
        raise DispatchError(
            f"{self.call_site}: no worker of {self.name} has registered mesh '{mesh_name}'.{nearest(mesh_name, names)} "
            "Registered: "
            f"{', '.join(names) or 'none'}. Workers do it with _register_dispatch_collect_info, before or in a call "
            "that was waited for."
        )

    def learn_mesh_facts(self, headers: Sequence[Header]) -> None:
        """Take in what workers reported.

        Every header that follows a registration carries it, so nothing is ever asked for.
        """
        for header in headers:
            for role, meshes in (header.mesh_facts or {}).items():
                for mesh, fact in meshes.items():
                    of_role = self._mesh.setdefault(role, {})
                    of_role.setdefault(mesh, [(0, False)] * self.world_size)[header.rank] = fact

    def shutdown(self) -> None:
        """End the group's processes. Safe to call twice; groups spawned from it end with it."""
        self.transport.shutdown()

    def _bind(self, name: str, value: Any) -> None:
        if hasattr(self, name):
            raise DispatchError(
                f"the registered method '{name}' of {self.name} would shadow an attribute of its group. Rename the "
                "method."
            )
        setattr(self, name, value)
