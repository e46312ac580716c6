"""`WorkerGroup`: what the driver holds, with a method for every registered one of its workers.

    with RayWorkerGroup(pool, RayClassWithInitArgs(Critic, config)) as group:
        group.init_model()                            # obeys the method's `blocking`
        future = group.update_critic.remote(batch)    # always a future
        future.get()

Several roles share the processes of one pool when they are fused first: methods are then
`<role>_<method>` on the fused group, and plain `<method>` on the groups that `spawn` gives:

    fused = RayWorkerGroup(pool, create_colocated_worker_cls({"actor": a, "ref": b}))
    groups = fused.spawn(["actor", "ref"])
"""

from __future__ import annotations

import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Self

from verl_like.batch.protocol import DataProto
from verl_like.batch.tensordict_rows import value_of
from verl_like.calls.chunks import drop_padding, own_value
from verl_like.calls.dispatch import (
    ATTRIBUTE,
    Dispatch,
    Execute,
    Mode,
    Registration,
    mode_of,
    registered_methods,
)
from verl_like.calls.future import DataProtoFuture, WorkerFuture
from verl_like.calls.messages import Call, Header
from verl_like.calls.pack import submit_all
from verl_like.calls.result import BOTH, METRICS, Result, collect_metrics, form_of
from verl_like.calls.target import CallSite, CallTarget, MeshFacts
from verl_like.calls.transport import Transport
from verl_like.errors import DispatchError, PlacementError, WorkerDiedError, nearest


class BoundMethod:
    """A registered method on a group: call it, or call `.remote` for a future in any case."""

    def __init__(
        self,
        group: WorkerGroup,
        role: str,
        method: str,
        function: Callable[..., Any],
        mark: Registration,
    ):
        """Made by `WorkerGroup` for every registered method."""
        self.group, self.mark = group, mark
        self.site = CallSite(role, method, function)
        self.mode: Mode = mode_of(mark.dispatch_mode, self.site.name)
        is_rank_zero_mode = getattr(mark.dispatch_mode, "name", "") == "RANK_ZERO"
        self.first_rank_only = mark.execute_mode is Execute.RANK_ZERO or is_rank_zero_mode
        self.form = self.mode.form
        if self.first_rank_only and self.form == "list":
            self.form = "first"
        returns_rows = self.form == "batch"
        if returns_rows and mark.returns == METRICS:
            self.form = "metrics"
        self.call = Call(role, method, returns_batch=returns_rows, past_queue=mark.past_queue)
        self.__doc__ = function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it; waits if the method was registered with `blocking=True`."""
        future = self.remote(*args, **kwargs)
        return future.get() if self.mark.blocking else future

    def remote(self, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run it and return a future at once."""
        if self.first_rank_only:
            return self.remote_on(0, *args, **kwargs)
        return self._launch(self._on_all_ranks(), args, kwargs)

    def remote_on(self, rank: int, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run it on one rank alone, which gets all rows: a future of the result of that rank."""
        group = self.group
        one = CallTarget(group.name, self.site, group.transport, [rank], lambda *_: [(0, True)])
        return self._launch(one, args, kwargs)

    def collecting_ranks(self) -> list[int]:
        """The ranks whose results count: one of those that share a model.

        There are as many as a batch has chunks.
        """
        return self._collecting_ranks(self._on_all_ranks())

    def _on_all_ranks(self) -> CallTarget:
        group = self.group
        ranks = range(group.world_size)
        return CallTarget(group.name, self.site, group.transport, ranks, group.mesh_facts)

    def _launch(
        self, target: CallTarget, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> WorkerFuture:
        group = self.group
        group.refuse_after_shutdown(self.site)
        split_args, split_kwargs = self.mode.dispatch_fn(target, *args, **kwargs)
        self._check_split(target, [*enumerate(split_args), *split_kwargs.items()])

        collecting = self._collecting_ranks(target)
        pending, keeps = submit_all(
            group.transport, self.call, target.ranks, split_args, split_kwargs, collecting
        )
        chunks = [pending[place] for place in collecting]
        kind = DataProtoFuture if self.form == "batch" else WorkerFuture
        collect = functools.partial(self._collect, target)
        batches = [each for each in (*args, *kwargs.values()) if isinstance(each, DataProto)]
        rows = max(map(len, batches), default=0)
        return kind(
            self.site.name,
            group.transport,
            pending,
            collect,
            form=self.form,
            chunks=chunks,
            rows=rows,
            keeps=keeps,
        )

    def _check_split(self, target: CallTarget, arguments: Sequence[tuple[int | str, Any]]) -> None:
        """Refuse what a dispatch function gave unless it is one element per worker."""
        size = target.world_size
        for name, values in arguments:
            if not isinstance(values, (list, tuple)) or len(values) != size:
                raise DispatchError(
                    f"{self.site}: the dispatch function must give a list with one element per "
                    f"worker ({size}) for every argument; for argument {name!r} it gave "
                    f"{type(values).__name__}."
                )

    def _collecting_ranks(self, target: CallTarget) -> list[int]:
        """The ranks whose results count, in the order of their rows."""
        if self.mode.collecting_ranks is not None:
            return self.mode.collecting_ranks(target)
        return list(range(target.world_size))

    def _collect(self, target: CallTarget, headers: list[Header], payloads: list[Any]) -> Any:
        """The result of the call, of the answers of all its ranks."""
        self.group.learn_mesh_facts(headers)
        answers = zip(payloads, headers, strict=True)
        if not self.call.returns_batch:
            own = [own_value(*answer) for answer in answers]
            return own[0] if self.form == "first" else self.mode.collect_fn(target, own)

        outputs = [drop_padding(*answer) for answer in answers]
        collecting = [headers[rank] for rank in self._collecting_ranks(target)]
        form = form_of(collecting, str(self.site))
        if form == METRICS:
            return collect_metrics(collecting)
        batch = value_of(self.mode.collect_fn(target, outputs))
        return Result(batch, collect_metrics(collecting)) if form == BOTH else batch


class WorkerGroup:
    """The workers of one role (or of several, fused) on one pool.

    Backends subclass it to start the processes.
    """

    def __init__(self, transport: Transport, roles: dict[str, type], prefixed: Collection[str]):
        """`roles` maps role to class; methods of `prefixed` roles are named `<role>_<method>`."""
        self.transport = transport
        self.roles = dict(roles)
        self.prefixed = frozenset(prefixed)
        self._ended = threading.Event()
        self._mesh: dict[str, dict[str, dict[int, tuple[int, bool]]]] = {}
        self._mesh_known_at: dict[int, float] = {}
        self._layouts: dict[tuple[str, str], MeshFacts] = {}
        """By mesh and role: what was found and checked since anything changed."""
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
        """One group per role on these same processes; its methods have no prefix."""
        spawned = {}
        for role in prefix_set:
            if role not in self.roles:
                raise PlacementError(
                    f"group {self.name} has no role '{role}'.{nearest(role, self.roles)} "
                    f"Roles: {', '.join(self.roles)}."
                )
            spawned[role] = WorkerGroup(self.transport, {role: self.roles[role]}, prefixed=())
            for shared in ("_ended", "_mesh", "_mesh_known_at", "_layouts"):
                setattr(spawned[role], shared, getattr(self, shared))
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

    def execute_all_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method by its name on every worker: a list of what they return, in rank order.

        Registered or not, it gets the arguments as they are; of a `Scatter`, each worker gets its
        element.
        """
        return self.execute_all_async(method_name, *args, **kwargs).get()

    def execute_all_async(self, method_name: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run a method by its name on every worker: a future of what they return, in rank order."""
        return self._by_name(method_name, Execute.ALL).remote(*args, **kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method by its name on rank 0 alone: what it returns."""
        return self.execute_rank_zero_async(method_name, *args, **kwargs).get()

    def execute_rank_zero_async(self, method_name: str, *args: Any, **kwargs: Any) -> WorkerFuture:
        """Run a method by its name on rank 0 alone: a future of what it returns."""
        return self._by_name(method_name, Execute.RANK_ZERO).remote(*args, **kwargs)

    def _by_name(self, name: str, execute_mode: Execute) -> BoundMethod:
        """A method of the workers, whether it is registered or not."""
        methods = {}
        for role, cls in self.roles.items():
            for method in dir(cls):
                if not method.startswith("__") and callable(getattr(cls, method)):
                    key = f"{role}_{method}" if role in self.prefixed else method
                    methods[key] = role, method, getattr(cls, method)
        if name not in methods:
            raise DispatchError(
                f"the workers of {self.name} have no method '{name}'.{nearest(name, methods)}"
            )
        role, method, function = methods[name]
        mark = getattr(function, ATTRIBUTE, Registration(Dispatch.ALL_TO_ALL, execute_mode))
        mark = replace(mark, dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=execute_mode)
        return BoundMethod(self, role, method, function, mark)

    def shares_processes_with(self, other: WorkerGroup) -> bool:
        """Whether both groups' workers live in the same processes."""
        return self.transport.process_key == other.transport.process_key

    def mesh_facts(self, mesh_name: str, site: CallSite | None = None) -> MeshFacts:
        """(dp rank, collects?) of every rank on a mesh, for a call of the role that `site` names.

        A mesh of that role (the group's first, unless said) comes before one that another role in
        the same processes registered.
        """
        role, where = (site.role, site.name) if site else (next(iter(self.roles)), self.name)
        if layout := self._layouts.get((mesh_name, role)):
            return layout
        facts = self._find_mesh(mesh_name, role)
        if len(facts) < self.world_size:
            names = sorted({name for role in self.roles for name in self._mesh.get(role, {})})
            missing = [rank for rank in range(self.world_size) if rank not in facts]
            raise DispatchError(
                f"{where}: rank(s) {missing} of {self.name} have not registered mesh "
                f"'{mesh_name}'.{nearest(mesh_name, names)} Registered: "
                f"{', '.join(names) or 'none'}. Workers do it with "
                "_register_dispatch_collect_info, in the constructor or in a call whose result "
                "was read before this one."
            )
        _check_mesh(f"{where}: mesh '{mesh_name}'", facts)
        layout = [facts[rank] for rank in range(self.world_size)]
        self._layouts[mesh_name, role] = layout
        return layout

    def _find_mesh(self, mesh_name: str, called_role: str) -> dict[int, tuple[int, bool]]:
        for role in sorted(self.roles, key=lambda role: role != called_role):
            if facts := self._mesh.get(role, {}).get(mesh_name):
                return facts
        return {}

    def learn_mesh_facts(self, headers: Sequence[Header]) -> None:
        """Take in what workers registered: headers carry it, so nothing is ever asked for.

        The first one does, and later ones once something else was registered than then.
        """
        for header in headers:
            if not header.mesh_facts or header.end < self._mesh_known_at.get(header.rank, 0.0):
                continue  # read late: the group has heard of a later call on this rank
            self._mesh_known_at[header.rank] = header.end
            self._layouts.clear()
            for role, meshes in header.mesh_facts.items():
                for mesh, fact in meshes.items():
                    self._mesh.setdefault(role, {}).setdefault(mesh, {})[header.rank] = fact

    def shutdown(self) -> None:
        """End the group's processes. Safe to call twice; groups spawned from it end with it."""
        self._ended.set()
        self.transport.shutdown()

    def refuse_after_shutdown(self, site: CallSite) -> None:
        """Refuse a call that nobody can answer any more."""
        if self._ended.is_set():
            raise WorkerDiedError(
                f"{site}: the group {self.name} was shut down, and its processes are gone; call it "
                "before shutdown(), or inside the group's `with` block."
            )

    def __enter__(self) -> Self:
        """For `with`: the processes end with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Shuts the group down."""
        self.shutdown()

    def __repr__(self) -> str:
        """What it is, for how many ranks, and whether it still is."""
        ended = ", shut down" if self._ended.is_set() else ""
        return f"<{type(self).__name__} {self.name}, world_size={self.world_size}{ended}>"


def method_table(
    roles: dict[str, type], prefixed: Collection[str]
) -> dict[str, tuple[str, str, Callable[..., Any], Registration]]:
    """The methods of a group: name on the group -> role, method, function, registration."""
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
    "prefixed",
    "roles",
    "transport",
}


def _check_mesh(where: str, facts: dict[int, tuple[int, bool]]) -> None:
    collecting: dict[int, list[int]] = defaultdict(list)
    for rank, (dp, is_collect) in facts.items():
        if is_collect:
            collecting[dp].append(rank)
    count = 1 + max(dp for dp, _ in facts.values())
    for dp in range(count):
        if len(collecting[dp]) != 1:
            raise DispatchError(
                f"{where}: data-parallel rank {dp} of {count} needs exactly one rank that "
                f"collects, it has {collecting[dp]}. Registered by rank: {facts}."
            )
