"""Calls for drivers that were written for verl.

`VerlGroup` calls methods by their name, and `scatter_lists` treats lists as verl does.
"""

from __future__ import annotations

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
)
from verl_like.errors import DispatchError, nearest

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
