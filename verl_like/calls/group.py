"""`WorkerGroup`: what the driver holds.

It grows one method for every registered method of its workers.

    group = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=RayClassWithInitArgs(Critic, config))
    group.init_model()                        # obeys the method's `blocking`
    future = group.update_critic.remote(batch)    # always a future

Several roles share the processes of one pool when they are fused first: methods are then
`<role>_<method>` on the fused group, and plain `<method>` on the groups that `spawn` gives:

    fused = RayWorkerGroup(resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls({"actor": a, "ref": b}))
    groups = fused.spawn(["actor", "ref"])
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from verl_like.batch.protocol import DataProto
from verl_like.batch.split import drop_padding
from verl_like.calls.dispatch import Execute, Mode, Registration, mode_of, registered_methods
from verl_like.calls.future import DataProtoFuture, WorkerFuture
from verl_like.calls.metrics import collect_metrics, has_metrics_alone
from verl_like.calls.pack import Sender
from verl_like.calls.transport import Call, Header, Transport
from verl_like.errors import DispatchError, PlacementError, nearest


class ClassWithInitArgs:
    """A worker class and its constructor's arguments, to be
    constructed later in a worker process.
    """

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
    """Names for messages while a call is dispatched:

    `critic.compute_values`, and what the method calls arguments.
    """

    def __init__(self, role: str, method: str, function: Callable[..., Any]):
        """Parameters are those after `self`."""
        self.role, self.name = role, f"{role}.{method}"
        self.parameters = list(inspect.signature(function).parameters)[1:]

    def __str__(self) -> str:
        return self.name

    def argument(self, position: int) -> str:
        """The name of a positional argument."""
        if position < len(self.parameters):
            return f"argument '{self.parameters[position]}'"
        return f"argument {position}"


class BoundMethod:
    """A registered method on a group: call it, or call `.remote` for a future whatever its
    `blocking` says.
    """

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        method: str,
        function: Callable[..., Any],
        mark: Registration,
    ):
        """Made by `WorkerGroup` for every registered method."""
        self.group, self.role, self.method, self.mark = group, role, method, mark
        self.site = CallSite(role, method, function)
        self.mode: Mode = mode_of(mark.dispatch_mode, self.site.name)
        first = (
            mark.execute_mode is Execute.RANK_ZERO
            or getattr(mark.dispatch_mode, "name", "") == "RANK_ZERO"
        )
        self.target: Any = _FirstRank(group) if first else group
        self.form = "first" if first and self.mode.form == "list" else self.mode.form
        declared = getattr(function, "__annotations__", {}).get("return", "")
        self.silent = self.form != "batch" and declared in (None, "None")
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; waits if the method was registered with `blocking=True`."""
        future = self._submit(args, kwargs, awaited=self.mark.blocking)
        return future.get() if self.mark.blocking else future

    def remote(self, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run it and return a future at once."""
        return self._submit(args, kwargs, awaited=False)

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any], awaited: bool) -> WorkerFuture:
        target = self.target
        self.group.call_site = self.site
        split_args, split_kwargs = self.mode.dispatch_fn(target, *args, **kwargs)
        for name, values in [*enumerate(split_args), *split_kwargs.items()]:
            if not isinstance(values, (list, tuple)) or len(values) != target.world_size:
                raise DispatchError(
                    f"{self.site}: the dispatch function must give a list with one element per "
                    f"worker ({target.world_size}) for every argument; for argument {name!r} it "
                    f"gave {type(values).__name__}."
                )
        bare = Call(
            self.role,
            self.method,
            silent=self.silent,
            awaited=awaited,
            past_queue=self.mark.past_queue,
        )
        sender = Sender(self.group.transport, bare, self.mark.materialize_futures)
        pending = []
        for rank in range(target.world_size):
            its_args = [values[rank] for values in split_args]
            its_kwargs = {name: values[rank] for name, values in split_kwargs.items()}
            pending.append(sender.submit(rank, its_args, its_kwargs))
        pieces = (
            [pending[rank] for rank in self.mode.collecting_ranks(target)]
            if self.mode.collecting_ranks
            else None
        )
        kind = DataProtoFuture if self.form == "batch" else WorkerFuture
        future = kind(
            self.site.name, self.group.transport, pending, self._collect, self.form, pieces
        )
        self.group.unread.add(future)
        return future

    def _collect(self, headers: list[Header], payloads: list[Any]) -> Any:
        group = self.group
        group.learn_mesh_facts(headers)
        group.call_site = self.site
        outputs = [
            drop_padding(payload, header) for payload, header in zip(payloads, headers, strict=True)
        ]
        if self.form != "batch":  # a batch is copied when its pieces are joined
            outputs = [o.slice(0, len(o)) if isinstance(o, DataProto) else o for o in outputs]
        if self.form == "first":
            return outputs[0]
        if self.form != "batch":
            return self.mode.collect_fn(self.target, outputs)
        return self._collect_batch(headers, outputs)

    def _collect_batch(self, headers: list[Header], outputs: list[Any]) -> Any:
        """The batch, `(batch, metrics)` if a collecting rank returned metrics, or metrics alone."""
        ranks = list(range(len(headers)))
        if self.mode.collecting_ranks:
            ranks = self.mode.collecting_ranks(self.target)
        collecting = [headers[rank] for rank in ranks]
        metrics = collect_metrics(collecting)
        if metrics is None:
            return self.mode.collect_fn(self.target, outputs)
        if has_metrics_alone(collecting, [outputs[rank] for rank in ranks], str(self.site)):
            return metrics
        return self.mode.collect_fn(self.target, outputs), metrics


class _FirstRank:
    """A group as the dispatch functions of a `RANK_ZERO` call see it: one worker, which gets and
    returns everything.
    """

    world_size = 1

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def mesh_facts(self, mesh_name: str) -> list[tuple[int, bool]]:
        return [(0, True)]


class WorkerGroup:
    """The workers of one role (or of several, fused) on one pool.

    Backends subclass it to start the processes.
    """

    def __init__(self, transport: Transport, roles: dict[str, type], prefixed: bool):
        """`roles` maps role to class; with `prefixed`, methods are named `<role>_<method>`."""
        self.transport = transport
        self.roles = dict(roles)
        self.prefixed = prefixed
        self.call_site: CallSite | str = self.name
        self.unread: weakref.WeakSet[WorkerFuture] = weakref.WeakSet()
        self._mesh: dict[str, dict[str, dict[int, tuple[int, bool]]]] = {}
        self.learn_mesh_facts(transport.started)
        for name, (role, method, function, mark) in method_table(roles, prefixed).items():
            setattr(self, name, BoundMethod(self, role, method, function, mark))

    @property
    def name(self) -> str:
        """The role, or the roles joined by "+"."""
        return "+".join(self.roles)

    @property
    def world_size(self) -> int:
        """Processes in the group."""
        return self.transport.world_size

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, WorkerGroup]:
        """One group per role on these same processes, with the role's
        prefix gone from its methods.
        """
        spawned = {}
        for role in prefix_set:
            if role not in self.roles:
                raise PlacementError(
                    f"group {self.name} has no role '{role}'.{nearest(role, self.roles)} "
                    f"Roles: {', '.join(self.roles)}."
                )
            spawned[role] = WorkerGroup(self.transport, {role: self.roles[role]}, prefixed=False)
            spawned[role]._mesh, spawned[role].unread = self._mesh, self.unread
        return spawned

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Make every role's group an attribute of this one."""
        for role, group in self.spawn(prefix_set).items():
            if hasattr(self, role):
                raise DispatchError(
                    f"role '{role}' would shadow an attribute of group {self.name}. Rename the "
                    "role."
                )
            setattr(self, role, group)

    def shares_processes_with(self, other: WorkerGroup) -> bool:
        """Whether both groups' workers live in the same processes."""
        return self.transport.process_key == other.transport.process_key

    def mesh_facts(self, mesh_name: str) -> list[tuple[int, bool]]:
        """(dp rank, collects?) of every rank on a mesh that the workers registered."""
        facts = self._find_mesh(mesh_name)
        if len(facts) < self.world_size:
            for future in list(self.unread):  # it may be one of these calls that registers the mesh
                with contextlib.suppress(Exception):  # kept by the future, for whoever reads it
                    future.get()
            facts = self._find_mesh(mesh_name)
        if len(facts) < self.world_size:
            names = sorted({name for role in self.roles for name in self._mesh.get(role, {})})
            missing = [rank for rank in range(self.world_size) if rank not in facts]
            raise DispatchError(
                f"{self.call_site}: rank(s) {missing} of {self.name} have not registered mesh "
                f"'{mesh_name}'.{nearest(mesh_name, names)} Registered: "
                f"{', '.join(names) or 'none'}. Workers do it with "
                "_register_dispatch_collect_info, in the constructor or in a call before this "
                "one."
            )
        _check_mesh(f"{self.call_site}: mesh '{mesh_name}'", facts)
        return [facts[rank] for rank in range(self.world_size)]

    def _find_mesh(self, mesh_name: str) -> dict[int, tuple[int, bool]]:
        called = "" if isinstance(self.call_site, str) else self.call_site.role
        roles = sorted(
            self.roles, key=lambda role: role != called
        )  # a mesh of the called role comes first
        return next(
            (facts for role in roles if (facts := self._mesh.get(role, {}).get(mesh_name))), {}
        )

    def learn_mesh_facts(self, headers: Sequence[Header]) -> None:
        """Take in what workers reported: every header carries it, so nothing is ever asked for."""
        for header in headers:
            for role, meshes in (header.mesh_facts or {}).items():
                for mesh, fact in meshes.items():
                    self._mesh.setdefault(role, {}).setdefault(mesh, {})[header.rank] = fact

    def shutdown(self) -> None:
        """End the group's processes. Safe to call twice; groups spawned from it end with it."""
        self.transport.shutdown()


def method_table(
    roles: dict[str, type], prefixed: bool
) -> dict[str, tuple[str, str, Callable[..., Any], Registration]]:
    """What a group of these roles will be able to do: name on the group -> role, method, function,
    registration.
    """
    table: dict[str, tuple[str, str, Callable[..., Any], Registration]] = {}
    for role, cls in roles.items():
        for method, function, mark in registered_methods(cls):
            name = f"{role}_{method}" if prefixed else method
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
    "call_site",
    "prefixed",
    "roles",
    "transport",
    "unread",
}


def _check_mesh(where: str, facts: dict[int, tuple[int, bool]]) -> None:
    dp_ranks = [dp for dp, _ in facts.values()]
    for dp in range(max(dp_ranks) + 1):
        collecting = [rank for rank, fact in facts.items() if fact == (dp, True)]
        if len(collecting) != 1:
            raise DispatchError(
                f"{where}: data-parallel rank {dp} of {max(dp_ranks) + 1} needs exactly one rank "
                f"that collects, it has {collecting}. Registered by rank: {facts}."
            )
