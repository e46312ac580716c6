"""What a dispatch or collect function sees of the group that a call is made on.

Every call has a target of its own, so calls that are split and collected at the same time, by
several threads or one within the other, do not see each other's role.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Protocol

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


class CallTarget(Protocol):
    """The workers that one call runs on."""

    @property
    def name(self) -> str:
        """The group: its role, or its roles joined by "+"."""

    @property
    def world_size(self) -> int:
        """Workers that run the call: 1 where rank 0 runs it alone."""

    @property
    def call_site(self) -> CallSite:
        """Names for messages."""

    @property
    def transport(self) -> Transport:
        """What carries the call."""

    def mesh_facts(self, mesh_name: str) -> MeshFacts:
        """The layout of a mesh of the called role, the same from the first question to the last."""
