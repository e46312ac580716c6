"""How a call on a group becomes one call per worker, and how the results become one value again.

`@register` marks a worker's method; `WorkerGroup` reads the mark and grows a method of the same
name. A dispatch mode is a pair:

    dispatch_fn(target, *args, **kwargs) -> (args, kwargs)   # every value a list by rank
    collect_fn(target, outputs) -> result                    # outputs by rank

Add one with `register_dispatch_mode(name, dispatch_fn, collect_fn)`, or hand `{"dispatch_fn": …,
"collect_fn": …}` to `@register`. What is broadcast and what is scattered is said, never guessed: a
list is one value unless it is a `Scatter`. `target` is the group as this call sees it. How rows are
cut is in `verl_like.batch.split`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from verl_like.batch.protocol import DataProto
from verl_like.batch.split import join_chunks, split_rows
from verl_like.batch.tensordict_rows import rows_of
from verl_like.calls.future import WorkerFuture
from verl_like.calls.result import declared_form
from verl_like.calls.transport import Transport
from verl_like.calls.wire import FutureChunk
from verl_like.errors import BatchError, DispatchError, nearest

F = TypeVar("F", bound=Callable[..., Any])
ATTRIBUTE = "_verl_like_register"
MeshFacts = list[tuple[int, bool]]
"""By rank: its data-parallel rank on a mesh, and whether its result is the one to collect."""


class CallTarget:
    """The workers that one call runs on, as a dispatch or collect function sees them.

    Every call has a target of its own, so calls that are split and collected at the same time, by
    several threads or one within the other, do not see each other's role.
    """

    def __init__(
        self,
        name: str,
        call_site: str,
        function: Callable[..., Any],
        transport: Transport,
        ranks: Sequence[int],
        find_mesh: Callable[[str], MeshFacts],
    ) -> None:
        """`name` is the group's; `ranks` of it run the method `function`, called `call_site`."""
        self.name, self.call_site, self.transport = name, call_site, transport
        self.ranks, self.world_size = list(ranks), len(ranks)
        self._function, self._find_mesh = function, find_mesh
        self._meshes: dict[str, MeshFacts] = {}

    def mesh_facts(self, mesh_name: str) -> MeshFacts:
        """The layout of a mesh of the called role, the same from the first question to the last."""
        if mesh_name not in self._meshes:
            self._meshes[mesh_name] = self._find_mesh(mesh_name)
        return self._meshes[mesh_name]

    def argument(self, position: int) -> str:
        """The method's name for a positional argument, for messages."""
        names = _parameters(self._function)
        return f"argument '{names[position]}'" if position < len(names) else f"argument {position}"


@functools.cache
def _parameters(function: Callable[..., Any]) -> list[str]:
    """Names of a method's parameters, without `self`."""
    return list(inspect.signature(function).parameters)[1:]


class OpenEnum:
    """A member of an open enumeration: compares, hashes, prints and pickles by name."""

    members: ClassVar[dict[str, Any]]

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_name, (self.name,)

    @classmethod
    def register(cls, name: str) -> Any:
        """Add a member (names are upper case) and give it back; one that exists stays as it is."""
        key = name.upper()
        if key not in cls.members:
            cls.members[key] = cls(key)
            setattr(cls, key, cls.members[key])
        return cls.members[key]

    @classmethod
    def remove(cls, name: str) -> None:
        """Take a member out again."""
        member = cls.from_name(name)
        del cls.members[member.name]
        delattr(cls, member.name)

    @classmethod
    def from_name(cls, name: str) -> Any:
        """The member of this name, upper or lower case."""
        if name.upper() not in cls.members:
            raise DispatchError(
                f"unknown {cls.__name__} '{name}'.{nearest(name.upper(), cls.members)} Known: "
                f"{', '.join(cls.members)}."
            )
        return cls.members[name.upper()]


class Dispatch(OpenEnum):
    """The dispatch modes; `Dispatch.register("MINE")` adds a name."""

    members: ClassVar[dict[str, Dispatch]] = {}
    RANK_ZERO: ClassVar[Dispatch]
    ONE_TO_ALL: ClassVar[Dispatch]
    ALL_TO_ALL: ClassVar[Dispatch]
    DP_COMPUTE: ClassVar[Dispatch]
    DP_COMPUTE_PROTO: ClassVar[Dispatch]
    DP_COMPUTE_PROTO_WITH_FUNC: ClassVar[Dispatch]
    DP_COMPUTE_METRIC: ClassVar[Dispatch]


class Execute(OpenEnum):
    """Which workers run the method: all of them, or rank 0 only."""

    members: ClassVar[dict[str, Execute]] = {}
    ALL: ClassVar[Execute]
    RANK_ZERO: ClassVar[Execute]


Execute.register("ALL")
Execute.register("RANK_ZERO")


class Scatter(list[Any]):
    """A list that says "one element per worker" to the modes that would broadcast a plain list."""


@dataclass(frozen=True)
class Mode:
    """A way to split a call and collect its results.

    `form` tells what the results are together: one `batch`, a `list`, the `first` of them, or
    something of the collect function's `own`. `collecting_ranks` gives those whose results count,
    where it is not all of them.
    """

    dispatch_fn: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    collect_fn: Callable[[Any, list[Any]], Any]
    form: str = "own"
    collecting_ranks: Callable[[CallTarget], list[int]] | None = None


@dataclass(frozen=True)
class Registration:
    """What `@register` wrote on a method."""

    dispatch_mode: Any
    execute_mode: Execute
    blocking: bool = True
    readonly: bool = False
    past_queue: bool = False
    returns: str = ""
    """The form that the method's annotation declares (`verl_like.calls.result`)."""


def split_over(target: CallTarget, value: Any, name: str, num_chunks: int) -> list[Any]:
    """Chunks of a batch, or of the future of one, for `num_chunks` data-parallel ranks."""
    if isinstance(value, WorkerFuture):
        if value.can_be_passed_to(target.transport, num_chunks):
            headers = value.headers_of_chunks
            return [FutureChunk(c.payload, headers, n) for n, c in enumerate(value.chunks)]
        value = value.batch()
    value = rows_of(value)
    if not isinstance(value, DataProto):
        raise DispatchError(
            f"{target.call_site}: {name} must be a DataProto or TensorDict (or the future of one) "
            f"to be split over {num_chunks} worker(s), got {type(value).__name__}. Put other "
            "values into meta_info, or register the method with Dispatch.ONE_TO_ALL."
        )
    if len(value) == 0:
        raise BatchError(
            f"{target.call_site}: {name} has no rows, nothing to split over {num_chunks} worker(s)."
        )
    return split_rows(value, num_chunks)


def _per_worker(fn: Callable[[CallTarget, Any, str], list[Any]]) -> Callable[..., Any]:
    """A `dispatch_fn` that treats every argument alike."""

    @functools.wraps(fn)
    def dispatch_fn(target: CallTarget, /, *args: Any, **kwargs: Any) -> Any:
        split = tuple(fn(target, value, target.argument(i)) for i, value in enumerate(args))
        named = {name: fn(target, value, f"argument '{name}'") for name, value in kwargs.items()}
        return split, named

    return dispatch_fn


@_per_worker
def dispatch_one_to_all(target: CallTarget, value: Any, name: str) -> list[Any]:
    """Every worker gets the same arguments."""
    return [value] * target.world_size


@_per_worker
def dispatch_all_to_all(target: CallTarget, value: Any, name: str) -> list[Any]:
    """A `Scatter` gives each worker its element; anything else goes to every worker as it is."""
    if isinstance(value, Scatter):
        return _checked_list(target, value, name)
    return [value] * target.world_size


@_per_worker
def dispatch_dp_compute(target: CallTarget, value: Any, name: str) -> list[Any]:
    """The caller has split already: a list or tuple with one element per worker."""
    return _checked_list(target, value, name)


@_per_worker
def dispatch_dp_compute_proto(target: CallTarget, value: Any, name: str) -> list[Any]:
    """Contiguous chunks of equal length; the last ones are padded with marked rows."""
    return split_over(target, value, name, target.world_size)


def dispatch_dp_compute_proto_with_func(
    target: CallTarget, func: Any, /, *args: Any, **kwargs: Any
) -> Any:
    """The first argument is a function and goes to every worker; the others are split."""
    if not callable(func):
        raise DispatchError(
            f"{target.call_site}: {target.argument(0)} must be a function, got "
            f"{type(func).__name__}."
        )
    size = target.world_size
    split_args = [
        split_over(target, value, target.argument(i), size) for i, value in enumerate(args, 1)
    ]
    _, split_kwargs = dispatch_dp_compute_proto(target, **kwargs)
    return ([func] * size, *split_args), split_kwargs


def collect_list(target: CallTarget, outputs: list[Any]) -> list[Any]:
    """One result per worker, in rank order."""
    return outputs


def collect_first(target: CallTarget, outputs: list[Any]) -> Any:
    """The result of rank 0."""
    return outputs[0]


def collect_dataproto(target: CallTarget, outputs: list[Any]) -> DataProto:
    """One batch of the workers' batches, in rank order.

    Chunks of ranks that held padding only are left out.
    """
    if any(type(output) is not type(outputs[0]) for output in outputs):
        raise DispatchError(
            f"{target.call_site} returned a TensorDict on some ranks and a DataProto on others: "
            "return the same on all."
        )
    return join_chunks(outputs)


def _checked_list(target: CallTarget, value: Any, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) != target.world_size:
        size = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
        raise DispatchError(
            f"{target.call_site}: {name} must be a list with one element for each of "
            f"{target.world_size} workers, got {type(value).__name__}{size}. To send one value to "
            "all of them, use Dispatch.ONE_TO_ALL."
        )
    return list(value)


MODES: dict[str, Mode] = {}
"""The modes by name; `Dispatch` has a member of each name."""


def register_dispatch_mode(
    dispatch_mode_name: str, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> Dispatch:
    """Add a dispatch mode; `Dispatch.<NAME>` exists from then on."""
    if dispatch_mode_name.upper() in MODES:
        raise DispatchError(
            f"dispatch mode {dispatch_mode_name} exists already: update_dispatch_mode changes it."
        )
    MODES[dispatch_mode_name.upper()] = Mode(dispatch_fn, collect_fn)
    member: Dispatch = Dispatch.register(dispatch_mode_name)
    return member


def update_dispatch_mode(
    dispatch_mode: Any, dispatch_fn: Callable[..., Any], collect_fn: Callable[..., Any]
) -> None:
    """Replace the functions of a mode that exists."""
    name = getattr(dispatch_mode, "name", dispatch_mode)
    MODES[Dispatch.from_name(str(name)).name] = Mode(dispatch_fn, collect_fn)


def make_nd_compute_dataproto_dispatch_fn(mesh_name: str) -> Mode:
    """Split over a mesh's data axis: ranks that share a dp rank get the same chunk.

    One of them gives the result.
    """

    @_per_worker
    def dispatch_fn(target: CallTarget, value: Any, name: str) -> list[Any]:
        dp_ranks = [dp for dp, _ in target.mesh_facts(mesh_name)]
        chunks = split_over(target, value, name, max(dp_ranks) + 1)
        return [chunks[dp] for dp in dp_ranks]

    def collecting_ranks(target: CallTarget) -> list[int]:
        facts = target.mesh_facts(mesh_name)
        by_dp_rank = {dp: rank for rank, (dp, is_collect) in enumerate(facts) if is_collect}
        return [by_dp_rank[dp] for dp in sorted(by_dp_rank)]

    def collect_fn(target: CallTarget, outputs: list[Any]) -> Any:
        return collect_dataproto(target, [outputs[rank] for rank in collecting_ranks(target)])

    return Mode(dispatch_fn, collect_fn, "batch", collecting_ranks)


def mode_of(dispatch_mode: Any, where: str) -> Mode:
    """The pair of functions behind whatever was given to `@register`."""
    if isinstance(dispatch_mode, Mode):
        return dispatch_mode
    if isinstance(dispatch_mode, dict):
        missing = {"dispatch_fn", "collect_fn"} - set(dispatch_mode)
        if missing:
            raise DispatchError(
                f"{where}: a dict dispatch mode needs dispatch_fn and collect_fn; missing: "
                f"{', '.join(sorted(missing))}."
            )
        return Mode(dispatch_mode["dispatch_fn"], dispatch_mode["collect_fn"])
    name = getattr(dispatch_mode, "name", dispatch_mode)
    if name not in MODES:
        raise DispatchError(
            f"{where}: unknown dispatch mode {dispatch_mode!r}.{nearest(str(name), MODES)} "
            f"Known: {', '.join(MODES)}."
        )
    return MODES[name]


def register(
    dispatch_mode: Any = None,
    execute_mode: Execute | None = None,
    blocking: bool = True,
    readonly: bool = False,
    past_queue: bool = False,
) -> Callable[[F], F]:
    """Mark a worker's method as callable through its group; an `async def` runs to its end.

    Where its mode splits a batch, the method's return annotation says what it gives: a batch,
    metrics, or both (`verl_like.calls.result`).

    Args:
        dispatch_mode: a `Dispatch` member, a dict of `dispatch_fn` and `collect_fn`, or the result
            of `make_nd_compute_dataproto_dispatch_fn`; `Dispatch.ALL_TO_ALL` unless given.
        execute_mode: `Execute.ALL` (unless given) or `Execute.RANK_ZERO`.
        blocking: whether `group.method(...)` waits. `group.method.remote(...)` never does.
        readonly: the method promises not to write into its batch, which is then handed over without
            a private copy.
        past_queue: the method runs at once, in a thread of its own, beside the call that is running
            and before those that wait: to stop a generation, say. It takes small values only, and
            must mind the other thread.
    """
    mode = Dispatch.ALL_TO_ALL if dispatch_mode is None else dispatch_mode
    mode_of(mode, "@register")
    if past_queue and mode not in (Dispatch.ALL_TO_ALL, Dispatch.ONE_TO_ALL, Dispatch.RANK_ZERO):
        raise DispatchError(
            "@register(past_queue=True) splits no batch: use ONE_TO_ALL, ALL_TO_ALL or RANK_ZERO."
        )

    def mark(method: F) -> F:
        execute = execute_mode or Execute.ALL
        returns = declared_form(method) if mode_of(mode, "@register").form == "batch" else ""
        mark_of = Registration(mode, execute, blocking, readonly, past_queue, returns)
        setattr(method, ATTRIBUTE, mark_of)
        return method

    return mark


def registered_methods(cls: type) -> Iterator[tuple[str, Callable[..., Any], Registration]]:
    """Every registered method of a worker class, inherited ones too."""
    for name, method in inspect.getmembers(cls, callable):
        mark = getattr(method, ATTRIBUTE, None)
        if isinstance(mark, Registration):
            yield name, method, mark


MODES |= {
    "RANK_ZERO": Mode(dispatch_all_to_all, collect_first, "first"),
    "ONE_TO_ALL": Mode(dispatch_one_to_all, collect_list, "list"),
    "ALL_TO_ALL": Mode(dispatch_all_to_all, collect_list, "list"),
    "DP_COMPUTE": Mode(dispatch_dp_compute, collect_list, "list"),
    "DP_COMPUTE_METRIC": Mode(dispatch_dp_compute_proto, collect_list, "list"),
    "DP_COMPUTE_PROTO": Mode(dispatch_dp_compute_proto, collect_dataproto, "batch"),
    "DP_COMPUTE_PROTO_WITH_FUNC": Mode(
        dispatch_dp_compute_proto_with_func, collect_dataproto, "batch"
    ),
}
for _name in MODES:
    Dispatch.register(_name)
