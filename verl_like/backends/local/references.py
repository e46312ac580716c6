"""References to results that lie in this process, or will: `Done` values and futures."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Done:
    """A reference to something that is there already."""

    value: Any


def resolve(value: Any) -> Any:
    """References anywhere in a message's lists and tuples, as values; waits for them."""
    if isinstance(value, Future):
        return value.result()
    if isinstance(value, Done):
        return value.value
    if type(value) in (list, tuple):
        return type(value)(map(resolve, value))
    return value
