"""`WorkerGroup`, the driver's handle on workers, has all their registered methods.

    with RayWorkerGroup(pool, RayClassWithInitArgs(Critic, config)) as group:
        group.init_model()                            # obeys the method's `blocking`
        future = group.update_critic.remote(batch)    # always a future
        future.get()

Fuse several roles to share the processes of one pool. Methods are then `<role>_<method>` on the
fused group, and plain `<method>` on the groups that `spawn` returns:

    fused = RayWorkerGroup(pool, create_colocated_worker_cls({"actor": a, "ref": b}))
    groups = fused.spawn(["actor", "ref"])
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Self

from verl_like.batch.protocol import DataProto
from verl_like.batch.split import view_rows
from verl_like.calls.dispatch import (
    CallTarget,
    Execute,
    MeshLayout,
    Registration,
    collect_first,
    collect_list,
    registered_methods,
    resolve_mode,
)
from verl_like.calls.future import DataProtoFuture, WorkerFuture
from verl_like.calls.messages import ONLY_METRICS, SHARED_BYTES, WITH_METRICS, Call, Header, Packer
from verl_like.calls.result import CallResult, collect_metrics, result_form
from verl_like.calls.transport import Transport
from verl_like.errors import DispatchError, PlacementError, WorkerDiedError, nearest
from verl_like.process.info import ProcessInfo
from verl_like.verl.groups import VerlGroup


class ClassWithInitArgs:
    """A worker class and its constructor's arguments, for a worker process to construct later.

    Example:

        critic = ClassWithInitArgs(Critic, config, lr=1e-5)     # there: Critic(config, lr=1e-5)

    Args:
        cls: a subclass of `Worker`.
        args: the constructor's positional arguments.
        kwargs: its keyword arguments.
    """

    def __init__(self, cls: type, *args: Any, **kwargs: Any) -> None:
        """Store the class and the arguments, which are pickled for the process."""
        self.cls, self.args, self.kwargs = cls, args, kwargs

    def roles(self, default: str) -> dict[str, ClassWithInitArgs]:
        """Return the roles of one process: here this class, under the name `default`.

        The roles that `create_colocated_worker_raw_cls` gave to the class come first.
        """
        others: dict[str, ClassWithInitArgs] = getattr(self.cls, "_colocated_classes", {})
        if default in others:
            raise PlacementError(
                f"name_prefix '{default}' is also the name of a role in {self.cls.__name__}. "
                "Choose another prefix."
            )
        return {**others, default: self}

    def constructors(
        self, default: str
    ) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
        """Return the class and arguments of every role; reject roles whose methods would clash."""
        roles = self.roles(default)
        method_table({role: role_class.cls for role, role_class in roles.items()}, self.prefixed)
        return {
            role: (role_class.cls, role_class.args, role_class.kwargs)
            for role, role_class in roles.items()
        }

    @property
    def prefixed(self) -> frozenset[str]:
        """The roles whose methods are named `<role>_<method>` on a fused group."""
        return frozenset(getattr(self.cls, "_colocated_classes", ()))


class ColocatedClasses(ClassWithInitArgs):
    """Several roles for one process; made by `create_colocated_worker_cls`."""

    def __init__(self, class_dict: Mapping[str, ClassWithInitArgs]) -> None:
        """Roles are constructed in the order of `class_dict`."""
        super().__init__(object)
        self.class_dict = dict(class_dict)

    def roles(self, default: str) -> dict[str, ClassWithInitArgs]:
        """Return every role by its name."""
        return self.class_dict

    @property
    def prefixed(self) -> frozenset[str]:
        """The names of all roles in the process."""
        return frozenset(self.class_dict)


def create_colocated_worker_cls(class_dict: Mapping[str, ClassWithInitArgs]) -> ColocatedClasses:
    """Fuse roles: each process of a pool holds one instance of each role.

        fused = RayWorkerGroup(pool, create_colocated_worker_cls({"actor": a, "ref": b}))
        groups = fused.spawn(["actor", "ref"])      # groups["actor"].compute_log_prob(batch)

    `class_dict` maps each role's name to its class; roles are constructed in this order. Pass the
    result as `ray_cls_with_init` of a worker group.

    Raises:
        PlacementError: `class_dict` is empty.
    """
    if not class_dict:
        raise PlacementError(
            "create_colocated_worker_cls needs at least one role, but got an empty dict."
        )
    return ColocatedClasses(class_dict)


class BoundMethod:
    """A registered method on a group: call it, or call `.remote`, which always returns a future."""

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        method: str,
        function: Callable[..., Any],
        mark: Registration,
    ):
        """`WorkerGroup` makes one for every registered method of its workers."""
        self.group, self.mark, self.role, self.function = group, mark, role, function
        owner = group.roles[role].__name__ if role == ProcessInfo.name else role
        self.name = f"{owner}.{method}"
        self.mode = resolve_mode(mark.dispatch_mode, self.name)
        is_rank_zero_mode = getattr(mark.dispatch_mode, "name", "") == "RANK_ZERO"
        is_on_first_rank = mark.execute_mode is Execute.RANK_ZERO or is_rank_zero_mode
        self.only_rank = 0 if is_on_first_rank else None
        self.collect_fn = self.mode.collect_fn
        if is_on_first_rank and self.collect_fn is collect_list:
            self.collect_fn = collect_first
        returns_batch = self.mode.returns_batch
        is_batch = returns_batch and mark.returns != ONLY_METRICS
        self.future_type = DataProtoFuture if is_batch else WorkerFuture
        self.call = Call(role, method, returns_batch=returns_batch, concurrent=mark.concurrent)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the method, and wait for it if it was registered with `blocking=True`."""
        future = self.remote_on(self.only_rank, *args, **kwargs)
        return future.get() if self.mark.blocking else future

    def remote(self, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run the method and return a future at once."""
        return self.remote_on(self.only_rank, *args, **kwargs)

    def collecting_ranks(self) -> list[int]:
        """Return the ranks whose results are collected: for a batch, one per chunk."""
        target = CallTarget(self.group, self.role, self.name, self.function)
        return self.mode.collecting_ranks(target)

    def remote_on(self, rank: int | None, /, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run the method on `rank`, which gets all rows, or on all ranks if None; return a future.

        The arguments are split, and each of these ranks gets a call.
        """
        if self.group.state.ended.is_set():
            raise WorkerDiedError(
                f"{self.name}: the group {self.group.name} was shut down, and its processes are "
                "gone. Call it before shutdown(), or inside the group's `with` block."
            )
        target = CallTarget(self.group, self.role, self.name, self.function, rank)
        split_args, split_kwargs = self.mode.dispatch_fn(target, *args, **kwargs)
        split, num_args = [*split_args, *split_kwargs.values()], len(split_args)
        transport = target.transport
        collecting = self.mode.collecting_ranks(target)
        packer, pending = Packer(transport.share), []
        for place, rank in enumerate(target.ranks):
            values, parts = packer.pack([_resolved(of_ranks[place]) for of_ranks in split])
            call = self.call._replace(
                args=tuple(values[:num_args]),
                kwargs=dict(zip(split_kwargs, values[num_args:], strict=True)),
                sends_result=not self.call.returns_batch or place in collecting,
            )
            if call.concurrent and parts:
                raise DispatchError(
                    f"{self.name} is registered with concurrent=True, so each argument must be "
                    f"below {SHARED_BYTES} bytes. Send less, or register it without that."
                )
            pending.append(transport.submit(rank, call, parts))

        batches = [value for value in (*args, *kwargs.values()) if isinstance(value, DataProto)]
        return self.future_type(
            self.name,
            transport,
            pending,
            functools.partial(self._collect, target, collecting),
            chunks=[pending[place] for place in collecting],
            rows=max(map(len, batches), default=0),
            argument_refs=packer.keeps,
        )

    def _collect(
        self,
        target: CallTarget,
        collecting: Sequence[int],
        headers: list[Header],
        payloads: list[Any],
    ) -> Any:
        """Return the result of the call, from the answers of all its ranks."""
        self.group.state.learn(headers)
        outputs = []
        for payload, header in zip(payloads, headers, strict=True):
            if isinstance(payload, DataProto) and header.rows not in (None, len(payload)):
                rows = view_rows(payload, 0, header.rows or 0)  # without padding
                rows.shard = payload.shard
                payload = rows
            outputs.append(payload)
        if not self.call.returns_batch:  # each output in separate memory
            values = [
                output.slice(0, len(output)) if isinstance(output, DataProto) else output
                for output in outputs
            ]
            return self.collect_fn(target, values)

        reporting = [headers[rank] for rank in collecting]
        form = result_form(reporting, self.name)
        if form == ONLY_METRICS:
            return collect_metrics(reporting)
        batch = self.collect_fn(target, outputs)
        return CallResult(batch, collect_metrics(reporting)) if form == WITH_METRICS else batch


def _resolved(value: Any) -> Any:
    """Return the value of a future, or its batch if it has one; return other values unchanged."""
    if isinstance(value, WorkerFuture):
        return value.batch() if isinstance(value, DataProtoFuture) else value.get()
    return value


class GroupState:
    """State shared by groups on the same processes: meshes, and whether the processes ended."""

    def __init__(self, name: str, world_size: int) -> None:
        self.name, self.world_size, self.ended = name, world_size, threading.Event()
        self._mesh: dict[str, dict[str, dict[int, tuple[int, bool]]]] = {}
        """Role -> mesh -> the position of every rank."""
        self._mesh_known_at: dict[int, float] = {}
        self._layouts: dict[tuple[str, str], MeshLayout] = {}
        """(mesh, role) -> the checked layout; cleared when a worker registers a mesh."""

    def learn(self, headers: Sequence[Header]) -> None:
        """Record the meshes that workers registered.

        The first header of a rank carries them, and so do later ones if a call registered more.
        """
        for header in headers:
            if not header.mesh_layout or header.end < self._mesh_known_at.get(header.rank, 0.0):
                continue  # a header of a later call on this rank was read before
            self._mesh_known_at[header.rank] = header.end
            self._layouts.clear()
            for role, meshes in header.mesh_layout.items():
                for mesh, position in meshes.items():
                    self._mesh.setdefault(role, {}).setdefault(mesh, {})[header.rank] = position

    def mesh(self, mesh_name: str, role: str, where: str) -> MeshLayout:
        """Return the layout of a mesh for a call of `role`; errors name the call by `where`.

        A mesh of that role takes precedence over a mesh of another role in the same processes.
        """
        layout = self._layouts.get((mesh_name, role))
        if layout:
            return layout
        positions: dict[int, tuple[int, bool]] = {}
        for owner in sorted(self._mesh, key=lambda owner: owner != role):
            positions = positions or self._mesh[owner].get(mesh_name, {})
        missing = [rank for rank in range(self.world_size) if rank not in positions]
        if missing:
            names = sorted({name for meshes in self._mesh.values() for name in meshes})
            raise DispatchError(
                f"{where}: rank(s) {missing} of {self.name} have not registered mesh "
                f"'{mesh_name}'.{nearest(mesh_name, names)} Registered: "
                f"{', '.join(names) or 'none'}. Workers do it with "
                "_register_dispatch_collect_info, in the constructor or in a call whose result "
                "was read before this one."
            )

        collecting: dict[int, list[int]] = defaultdict(list)
        for rank, (dp, is_collect) in positions.items():
            if is_collect:
                collecting[dp].append(rank)
        count = 1 + max(dp for dp, _ in positions.values())
        for dp in range(count):
            if len(collecting[dp]) != 1:
                raise DispatchError(
                    f"{where}: mesh '{mesh_name}': data-parallel rank {dp} of {count} needs "
                    f"exactly one rank that collects, but has {collecting[dp]}. Registered by "
                    f"rank: {positions}."
                )
        layout = self._layouts[mesh_name, role] = [
            positions[rank] for rank in range(self.world_size)
        ]
        return layout


def check_group_arguments(group: WorkerGroup, kind: type, pool: object, cls: object) -> None:
    """Reject a pool that is not of the backend's `kind`, and a class without its arguments."""
    name = type(group).__name__
    if not isinstance(pool, kind):
        sizes = pool if isinstance(pool, list) else [1]
        raise PlacementError(
            f"{name} needs a {kind.__name__}, not {type(pool).__name__}: {kind.__name__}({sizes})."
        )
    if not isinstance(cls, ClassWithInitArgs):
        worker = getattr(cls, "__name__", "MyWorker")
        raise PlacementError(
            f"ray_cls_with_init must be a ClassWithInitArgs: ClassWithInitArgs({worker}, ...)."
        )


class WorkerGroup(VerlGroup):
    """The workers of one role, or of several fused roles, on one pool.

    Backends subclass it to start the processes.
    """

    def __init__(
        self,
        transport: Transport,
        roles: Mapping[str, type],
        prefixed: Collection[str],
        state: GroupState | None = None,
    ):
        """Take the running processes; users create a group of a backend instead.

        Args:
            transport: sends calls to the processes.
            roles: role -> class.
            prefixed: the roles whose methods are named `<role>_<method>` on the group.
            state: the state of the group from which this group is spawned.
        """
        self.transport, self.roles, self.prefixed = transport, dict(roles), frozenset(prefixed)
        self.name, self.world_size = "+".join(roles), transport.world_size
        self.state = state or GroupState(self.name, transport.world_size)
        self.state.learn(transport.started)
        for name, (role, method, function, mark) in method_table(roles, prefixed).items():
            setattr(self, name, self.bind(role, method, function, mark))

    def __getattr__(self, name: str) -> Any:
        """Raise an error that tells an unregistered method of the workers from an unknown name."""
        if name.startswith("__") or "roles" not in vars(self):  # such as while it is unpickled
            raise AttributeError(name)
        methods = self.methods_by_name()
        if name not in methods:
            raise AttributeError(f"{self!r} has no attribute '{name}'.{nearest(name, methods)}")
        role, method, _ = methods[name]
        raise AttributeError(
            f"{self.roles[role].__name__} has the method '{method}', but it isn't registered, and "
            "a group has only the methods with @register. Register it, or call "
            f"execute_all_sync('{name}')."
        )

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """Return role -> a group on these same processes, whose methods have no prefix.

        A name in `prefix_set` that is no role raises `PlacementError`.
        """
        spawned = {}
        for role in prefix_set:
            if role not in self.roles:
                raise PlacementError(
                    f"group {self.name} has no role '{role}'.{nearest(role, self.roles)} "
                    f"Roles: {', '.join(self.roles)}."
                )
            classes = {role: self.roles[role]}
            spawned[role] = WorkerGroup(self.transport, classes, prefixed=(), state=self.state)
        return spawned

    def bind(
        self, role: str, method: str, function: Callable[..., Any], mark: Registration
    ) -> BoundMethod:
        """Return a method of this group for a method of its workers."""
        return BoundMethod(self, role, method, function, mark)

    def shares_processes_with(self, other: WorkerGroup) -> bool:
        """Return whether the workers of both groups are in the same processes."""
        return self.transport.process_key == other.transport.process_key

    def mesh_layout(self, mesh_name: str) -> MeshLayout:
        """Return (data-parallel rank on the mesh, whether its result is collected) of every rank.

        `DispatchError` is raised if a rank has not registered the mesh.
        """
        return self.state.mesh(mesh_name, role=next(iter(self.roles)), where=self.name)

    def shutdown(self) -> None:
        """End the group's processes. Safe to call twice; groups spawned from it end with it."""
        self.state.ended.set()
        self.transport.shutdown()

    def __enter__(self) -> Self:
        """For `with`: the processes end with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shut the group down."""
        self.shutdown()

    def __repr__(self) -> str:
        """The group's class, roles and size, and whether it was shut down."""
        ended = ", shut down" if self.state.ended.is_set() else ""
        return f"<{type(self).__name__} {self.name}, world_size={self.world_size}{ended}>"


def method_table(
    roles: Mapping[str, type], prefixed: Collection[str]
) -> dict[str, tuple[str, str, Callable[..., Any], Registration]]:
    """Return the methods of a group: name on the group -> role, method, function, registration."""
    table: dict[str, tuple[str, str, Callable[..., Any], Registration]] = {}
    for role, cls in roles.items():
        for method, function, mark in registered_methods(cls):
            name = f"{role}_{method}" if role in prefixed else method
            if name in _RESERVED:
                raise DispatchError(
                    f"the registered method '{name}' of {role} ({cls.__name__}) would shadow an "
                    "attribute of its group. Rename the method."
                )
            if name in table:
                other = ".".join(table[name][:2])
                raise DispatchError(
                    f"{role}.{method} and {other} would both be '{name}' on the group. Rename a "
                    "role."
                )
            table[name] = role, method, function, mark
    return table


_RESERVED = {name for name in dir(WorkerGroup) if not name.startswith("__")} | {
    "name",
    "prefixed",
    "roles",
    "state",
    "transport",
    "world_size",
}
