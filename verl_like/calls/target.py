"""What a dispatch or collect function sees of the group that a call is made on.

Every call has a target of its own, so calls that are split and collected at the same time, by
several threads or one within the other, do not see each other's role.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from verl_like.calls.transport import Transport

MeshFacts = list[tuple[int, bool]]
"""By rank: its data-parallel rank on a mesh, and whether its result is the one to collect."""


class CallSite:
    """Names for messages about a call: `critic.compute_values`, and what it calls its arguments."""

    def __init__(self, role: str, method: str, function: Callable[..., Any]):
        """Of a method of the role's class."""
        self.role, self.name = role, f"{role}.{method}"
        self._function = function

    def __str__(self) -> str:
        return self.name

    def argument(self, position: int) -> str:
        """The name of a positional argument."""
        names = self._parameters
        return f"argument '{names[position]}'" if position < len(names) else f"argument {position}"

    @functools.cached_property
    def _parameters(self) -> list[str]:
        """Names of the method's parameters, without `self`: every call asks for some."""
        _, *names = inspect.signature(self._function).parameters
        return names


class CallTarget:
    """The workers that one call runs on."""

    def __init__(
        self,
        name: str,
        call_site: CallSite,
        transport: Transport,
        ranks: Sequence[int],
        find_mesh: Callable[[str, CallSite], MeshFacts],
    ) -> None:
        """`ranks` of a group of this name run it: all, or one alone, which gets everything."""
        self.name, self.call_site, self.transport = name, call_site, transport
        self.ranks, self.world_size = list(ranks), len(ranks)
        self._find_mesh = find_mesh
        self._meshes: dict[str, MeshFacts] = {}

    def mesh_facts(self, mesh_name: str) -> MeshFacts:
        """The layout of a mesh of the called role, the same from the first question to the last."""
        if mesh_name not in self._meshes:
            self._meshes[mesh_name] = self._find_mesh(mesh_name, self.call_site)
        return self._meshes[mesh_name]
