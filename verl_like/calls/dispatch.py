"""Split a call on a group into one call per worker, and collect the results into one value.

`@register` marks a worker's method, and `WorkerGroup` gets a method of the same name. A dispatch
mode is a pair:

    dispatch_fn(target, *args, **kwargs) -> (args, kwargs)   # every value a list by rank
    collect_fn(target, outputs) -> result                    # outputs by rank

Add one with `register_dispatch_mode(name, dispatch_fn, collect_fn)`, or pass `{"dispatch_fn": …,
"collect_fn": …}` to `@register`. In `ALL_TO_ALL`, a list is one value unless it is a `PerRank`.
`target` is the group as this call sees it. `verl_like.batch.split` cuts the rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeVar

from verl_like.batch.protocol import DataProto
from verl_like.batch.split import join_chunks, split_into_parts, split_rows
from verl_like.calls.future import DataProtoFuture, WorkerFuture
from verl_like.calls.messages import FutureChunk
from verl_like.calls.result import declared_form
from verl_like.calls.transport import Transport
from verl_like.errors import BatchError, DispatchError, nearest

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "_verl_like_register"
MeshLayout = list[tuple[int, bool]]
"""For each rank: its data-parallel rank on a mesh, and True if its result is collected."""


class CallTarget:
    """A call's workers, as a dispatch or collect function sees them.

    Every call has its own target, so calls that are split and collected at the same time do not see
    each other's role and meshes.
    """

    def __init__(
        self,
        group: Group,
        role: str,
        call_site: str,
        function: Callable[..., Any],
        rank: int | None = None,
    ) -> None:
        """All ranks of `group`, or one `rank`, run the method `function` of a role.

        Messages name the call by `call_site`.
        """
        self.name, self.transport, self.call_site = group.name, group.transport, call_site
        self.ranks = list(range(group.world_size)) if rank is None else [rank]
        self.world_size = len(self.ranks)
        self._group, self._role, self._function = group, role, function
        self._is_one_rank = rank is not None
        self.shares_parts = rank is None and group.transport.has_store
        """True if the ranks of a node may get one part of a batch, and take their rows from it."""
        self._meshes: dict[str, MeshLayout] = {}

    def mesh_layout(self, mesh_name: str) -> MeshLayout:
        """Return the layout of a mesh, which does not change between split and collect."""
        if self._is_one_rank:
            return [(0, True)]
        if mesh_name not in self._meshes:
            layout = self._group.state.mesh(mesh_name, role=self._role, where=self.call_site)
            self._meshes[mesh_name] = layout
        return self._meshes[mesh_name]

    def argument(self, key: int | str) -> str:
        """Return an argument in words, for messages; `key` is its position or its name."""
        if isinstance(key, int):
            names = list(inspect.signature(self._function).parameters)[1:]  # without `self`
            if key >= len(names):
                return f"argument {key}"
            key = names[key]
        return f"argument '{key}'"


class Group(Protocol):
    """The interface of a group that a call uses."""

    name: str
    world_size: int
    transport: Transport
    state: Any
    """The `GroupState`, which knows the meshes."""


class Dispatch:
    """A named dispatch mode: one object per name, even after unpickling.

    - `ALL_TO_ALL`, `ONE_TO_ALL`: all workers get the arguments; `get()` gives a list by rank. Only
      `ALL_TO_ALL` gives each worker its element of a `PerRank`.
    - `RANK_ZERO`: only rank 0 runs the method; `get()` gives its result.
    - `DP_COMPUTE`: every argument is a list with one element per worker; `get()` gives a list.
    - `DP_COMPUTE_PROTO`: batches are split over the workers; `get()` gives the joined batch.
    - `DP_COMPUTE_PROTO_WITH_FUNC`: the same, after a first argument that is a function.
    - `DP_COMPUTE_METRIC`: batches are split; `get()` gives a list by rank.

    `register_dispatch_mode` adds one. `mode` holds its functions.

    Example:

        class Scorer(Worker):
            @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
            def score(self, data: DataProto) -> DataProto: ...
    """

    members: ClassVar[dict[str, Dispatch]] = {}
    RANK_ZERO: ClassVar[Dispatch]
    ONE_TO_ALL: ClassVar[Dispatch]
    ALL_TO_ALL: ClassVar[Dispatch]
    DP_COMPUTE: ClassVar[Dispatch]
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[Dispatch]
    DP_COMPUTE_METRIC: ClassVar[Dispatch]

    def __init__(self, name: str) -> None:
        self.name = name
        self.mode: Mode | None = None

    def __repr__(self) -> str:
        return f"Dispatch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return Dispatch.from_name, (self.name,)

    @classmethod
    def register(cls, name: str) -> Dispatch:
        """Return the member of this name (in upper case), which is added if there is none."""
        member = cls.members.setdefault(name.upper(), cls(name.upper()))
        setattr(cls, member.name, member)
        return member

    @classmethod
    def remove(cls, name: str) -> None:
        """Remove a member."""
        member = cls.members.pop(cls.from_name(name).name)
        delattr(cls, member.name)

    @classmethod
    def from_name(cls, name: str) -> Dispatch:
        """Return the member of this name, in upper or lower case."""
        if name.upper() not in cls.members:
            raise DispatchError(
                f"unknown Dispatch '{name}'.{nearest(name.upper(), cls.members)} Known: "
                f"{', '.join(cls.members)}."
            )
        return cls.members[name.upper()]


class Execute(Enum):
    """Workers that run a method, for `@register`: all of them, or only rank 0."""

    ALL = "ALL"
    RANK_ZERO = "RANK_ZERO"


class PerRank(list[Any]):
    """A list with one element per worker, for `ALL_TO_ALL`, which would broadcast a plain list.

    Example:

        group.set_temperature(PerRank([0.7, 1.0]))      # 0.7 on rank 0, 1.0 on rank 1
    """


def all_ranks(target: CallTarget) -> list[int]:
    """Return the positions of all workers that a call runs on."""
    return list(range(target.world_size))


@dataclass(frozen=True)
class Mode:
    """A way to split a call and to collect its results.

    With `returns_batch`, the workers' results are chunks of a batch, metrics, or both.
    `collecting_ranks` returns the positions of the workers whose results are collected.
    """

    dispatch_fn: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    collect_fn: Callable[[Any, list[Any]], Any]
    returns_batch: bool = False
    collecting_ranks: Callable[[CallTarget], list[int]] = all_ranks


def mode_of_functions(dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]) -> Mode:
    """Return the mode of a user's functions, which checks what `dispatch_fn` returns."""

    @functools.wraps(dispatch_fn)
    def checked(target: CallTarget, /, *args: Any, **kwargs: Any) -> Any:
        target.shares_parts = False  # a function of a user gets chunks
        split_args, split_kwargs = dispatch_fn(target, *args, **kwargs)
        for name, values in [*enumerate(split_args), *split_kwargs.items()]:
            is_list = isinstance(values, (list, tuple))
            if not is_list or len(values) != target.world_size:
                size = f" of {len(values)}" if is_list else ""
                raise DispatchError(
                    f"{target.call_site}: the dispatch function must return a list with one "
                    f"element per worker ({target.world_size}) for every argument, but returned "
                    f"a {type(values).__name__}{size} for argument {name!r}."
                )
        return split_args, split_kwargs

    return Mode(checked, collect_fn)


@dataclass(frozen=True)
class Registration:
    """The settings that `@register` attaches to a method; `register` explains them."""

    dispatch_mode: Any
    execute_mode: Execute
    blocking: bool = True
    readonly: bool = False
    concurrent: bool = False
    returns: str = ""
    """The form that the method's annotation declares (`verl_like.calls.result`)."""


def split_over(target: CallTarget, value: Any, key: int | str, num_chunks: int) -> list[Any]:
    """Return the chunks of a batch, or of the future of one, for `num_chunks` data-parallel ranks.

    `key` is the argument's position or name, for messages.
    """
    if isinstance(value, WorkerFuture):
        if isinstance(value, DataProtoFuture) and value.fits(target.transport, num_chunks):
            headers = value.headers_of_chunks
            return [FutureChunk(c.payload, headers, n) for n, c in enumerate(value.chunks)]
        value = value.batch()
    if not isinstance(value, DataProto):
        raise DispatchError(
            f"{target.call_site}: {target.argument(key)} must be a DataProto (or the future of "
            f"one) to be split over {num_chunks} worker(s), got {type(value).__name__}. Convert a "
            "TensorDict with DataProto.from_tensordict(), put other values into meta_info, or "
            "register the method with Dispatch.ONE_TO_ALL."
        )
    if len(value) == 0:
        raise BatchError(
            f"{target.call_site}: {target.argument(key)} has no rows to split over {num_chunks} "
            "worker(s)."
        )
    if not target.shares_parts:
        return split_rows(value, num_chunks)
    nodes = sum(process.local_rank == 0 for process in target.transport.processes)
    return split_into_parts(value, num_chunks, per_part=-(-num_chunks // nodes))


def _per_argument(split: Callable[[CallTarget, Any, int | str], list[Any]]) -> Callable[..., Any]:
    """Return a `dispatch_fn` that splits every argument by the same function."""

    @functools.wraps(split)
    def dispatch_fn(target: CallTarget, /, *args: Any, **kwargs: Any) -> Any:
        split_args = tuple(split(target, value, place) for place, value in enumerate(args))
        return split_args, {name: split(target, value, name) for name, value in kwargs.items()}

    return dispatch_fn


@_per_argument
def dispatch_one_to_all(target: CallTarget, value: Any, key: int | str) -> list[Any]:
    """Give every worker the same arguments."""
    return [value] * target.world_size


@_per_argument
def dispatch_all_to_all(target: CallTarget, value: Any, key: int | str) -> list[Any]:
    """Give every worker its element of a `PerRank`, and all workers the other arguments."""
    if isinstance(value, PerRank):
        return _checked_list(target, value, key)
    return [value] * target.world_size


@_per_argument
def dispatch_dp_compute(target: CallTarget, value: Any, key: int | str) -> list[Any]:
    """Give every worker its element of a list or tuple that the caller has split."""
    return _checked_list(target, value, key)


@_per_argument
def dispatch_dp_compute_proto(target: CallTarget, value: Any, key: int | str) -> list[Any]:
    """Give every worker a contiguous chunk; chunks have equal length, with marked pad rows."""
    return split_over(target, value, key, target.world_size)


def dispatch_dp_compute_proto_with_func(
    target: CallTarget, func: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """Give every worker the first argument, a function, and split the others."""
    if not callable(func):
        raise DispatchError(
            f"{target.call_site}: {target.argument(0)} must be a function, got "
            f"{type(func).__name__}."
        )
    size = target.world_size
    split_args = [split_over(target, value, place, size) for place, value in enumerate(args, 1)]
    _, split_kwargs = dispatch_dp_compute_proto(target, **kwargs)
    return ([func] * size, *split_args), split_kwargs


def _checked_list(target: CallTarget, value: Any, key: int | str) -> list[Any]:
    """Return an argument that is a list with one element per worker; raise if it is not."""
    if not isinstance(value, (list, tuple)) or len(value) != target.world_size:
        size = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
        raise DispatchError(
            f"{target.call_site}: {target.argument(key)} must be a list with one element for each "
            f"of {target.world_size} workers, got {type(value).__name__}{size}. To send one value "
            "to all of them, use Dispatch.ONE_TO_ALL."
        )
    return list(value)


def collect_list(target: CallTarget, outputs: list[Any]) -> list[Any]:
    """Return one result per worker, in rank order."""
    return outputs


def collect_first(target: CallTarget, outputs: list[Any]) -> Any:
    """Return the result of the first worker."""
    return outputs[0]


def collect_dataproto(target: CallTarget, outputs: list[Any]) -> DataProto:
    """Concatenate the workers' batches in rank order, without chunks that hold only padding."""
    return join_chunks(outputs)


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> Dispatch:
    """Add a dispatch mode; `Dispatch.<NAME>`, in upper case, exists from then on.

        register_dispatch_mode("reverse", dispatch_fn, collect_fn)
        @register(dispatch_mode=Dispatch.REVERSE)

    Args:
        dispatch_mode_name: a name that no mode has; otherwise `DispatchError` is raised.
        dispatch_fn: `dispatch_fn(group, *args, **kwargs) -> (args, kwargs)`, in which every value
            is a list with one element per worker.
        collect_fn: `collect_fn(group, outputs) -> result`, with the workers' results by rank.
    """
    member = Dispatch.register(dispatch_mode_name)
    if member.mode is not None:
        raise DispatchError(
            f"dispatch mode {dispatch_mode_name} already exists. Change it with "
            "update_dispatch_mode."
        )
    member.mode = mode_of_functions(dispatch_fn, collect_fn)
    return member


def update_dispatch_mode(
    dispatch_mode: Any, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of a mode that exists.

    Args:
        dispatch_mode: a `Dispatch` member or its name; an unknown name raises `DispatchError`.
        dispatch_fn: as in `register_dispatch_mode`.
        collect_fn: as in `register_dispatch_mode`.
    """
    name = getattr(dispatch_mode, "name", dispatch_mode)
    Dispatch.from_name(str(name)).mode = mode_of_functions(dispatch_fn, collect_fn)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Mode:
    """Return a mode that splits over a mesh's data-parallel ranks (the function's name is verl's).

    Ranks that share a data-parallel rank get the same chunk, and one of them returns the result.
    """

    @_per_argument
    def dispatch_fn(target: CallTarget, value: Any, key: int | str) -> list[Any]:
        dp_ranks = [dp for dp, _ in target.mesh_layout(mesh_name)]
        chunks = split_over(target, value, key, max(dp_ranks) + 1)
        return [chunks[dp] for dp in dp_ranks]

    def collecting_ranks(target: CallTarget) -> list[int]:
        layout = target.mesh_layout(mesh_name)
        by_dp_rank = {dp: rank for rank, (dp, is_collect) in enumerate(layout) if is_collect}
        return [by_dp_rank[dp] for dp in sorted(by_dp_rank)]

    def collect_fn(target: CallTarget, outputs: list[Any]) -> Any:
        return collect_dataproto(target, [outputs[rank] for rank in collecting_ranks(target)])

    return Mode(dispatch_fn, collect_fn, True, collecting_ranks)


def resolve_mode(dispatch_mode: Any, where: str) -> Mode:
    """Return the functions of the `dispatch_mode` that was given to `@register`."""
    if isinstance(dispatch_mode, Mode):
        return dispatch_mode
    if isinstance(dispatch_mode, dict):
        missing = {"dispatch_fn", "collect_fn"} - set(dispatch_mode)
        if missing:
            raise DispatchError(
                f"{where}: a dict dispatch mode needs dispatch_fn and collect_fn; missing: "
                f"{', '.join(sorted(missing))}."
            )
        return mode_of_functions(dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"])
    name = str(getattr(dispatch_mode, "name", dispatch_mode))
    known = {member.name: member.mode for member in Dispatch.members.values() if member.mode}
    if name not in known:
        raise DispatchError(
            f"{where}: unknown dispatch mode {dispatch_mode!r}.{nearest(name, known)} "
            f"Known: {', '.join(known)}."
        )
    return known[name]


def register(
    dispatch_mode: Any = None,
    execute_mode: Execute | None = None,
    blocking: bool = True,
    readonly: bool = False,
    concurrent: bool = False,
) -> Callable[[F], F]:
    """Mark a worker's method as callable through its group; an `async def` runs to its end.

    If the mode joins the results into a batch, the method's return annotation declares what the
    method returns: a batch, metrics, or both (`verl_like.calls.result`).

        @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)
        def add(self, data: DataProto) -> DataProto: ...

    Args:
        dispatch_mode: a `Dispatch` member, a dict of `dispatch_fn` and `collect_fn`, or the result
            of `make_nd_compute_dataproto_dispatch_fn`. The default is `Dispatch.ALL_TO_ALL`.
        execute_mode: `Execute.ALL` (the default) or `Execute.RANK_ZERO`.
        blocking: whether `group.method(...)` waits for the result; if not, it returns a future, as
            `group.method.remote(...)` always does.
        readonly: the method does not write into its batch, so it gets no private copy.
        concurrent: the method runs at once in its own thread, next to the call that is running and
            before those that wait, for example to stop a generation. Its arguments must be small
            (tensors, arrays and batches below 100 kB), and it must be safe to run next to another
            thread.

    Raises:
        DispatchError: the mode is unknown, or not possible for a concurrent method; or the
            annotation of a method whose results are joined is neither a batch nor metrics.
    """
    mode = Dispatch.ALL_TO_ALL if dispatch_mode is None else dispatch_mode
    resolve_mode(mode, "@register")
    if concurrent and mode not in (Dispatch.ALL_TO_ALL, Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
        raise DispatchError(
            "@register(concurrent=True) works only with Dispatch.ONE_TO_ALL, ALL_TO_ALL and "
            "RANK_ZERO."
        )

    def mark(method: F) -> F:
        execute = execute_mode or Execute.ALL
        returns = declared_form(method) if resolve_mode(mode, "@register").returns_batch else ""
        mark_of = Registration(mode, execute, blocking, readonly, concurrent, returns)
        setattr(method, ATTRIBUTE, mark_of)
        return method

    return mark


def registered_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any], Registration]]:
    """Return every registered method of a worker class, including inherited methods."""
    for name, method in inspect.getmembers(cls, callable):
        mark = getattr(method, ATTRIBUTE, None)
        if isinstance(mark, Registration):
            yield name, method, mark


for _name, _mode in {
    "RANK_ZERO": Mode(dispatch_all_to_all, collect_first),
    "ONE_TO_ALL": Mode(dispatch_one_to_all, collect_list),
    "ALL_TO_ALL": Mode(dispatch_all_to_all, collect_list),
    "DP_COMPUTE": Mode(dispatch_dp_compute, collect_list),
    "DP_COMPUTE_METRIC": Mode(dispatch_dp_compute_proto, collect_list),
    "DP_COMPUTE_PROTO": Mode(dispatch_dp_compute_proto, collect_dataproto, True),
    "DP_COMPUTE_PROTO_WITH_FUNC": Mode(
        dispatch_dp_compute_proto_with_func, collect_dataproto, True
    ),
}.items():
    Dispatch.register(_name).mode = _mode
